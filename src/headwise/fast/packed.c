// Products with a matrix in few bits, on a CPU. Compiled together with native.c and called by packed.py.
//
// 32 neighbours in a row fill as many words as they have bits, without gaps; rows begin at a new word. A number is
// stored with half of its range added. Neighbours of a group share a scale, of which 16 bits (bfloat16) are stored.

#include <stdint.h>
#include <string.h>

#define LANES 8
#define EACH 16  // numbers, at least, that share a scale
#define MOST 4  // rows that are multiplied together: `FEW` of products.py

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

typedef struct {
    const uint32_t *words;
    const uint16_t *scale;
    int64_t rows, columns, groups;
    int32_t bits;
} Packed;

static inline float number(uint16_t scale) {
    uint32_t bits = (uint32_t)scale << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// Eight bytes, of which those behind the end of a matrix are zeros.
static inline uint64_t bytes_at(const uint8_t *bytes, const uint8_t *end) {
    uint64_t found = 0;
    if (bytes + 8 <= end) memcpy(&found, bytes, 8);
    else if (bytes < end) memcpy(&found, bytes, end - bytes);
    return found;
}

// LANES whole numbers, which begin with a byte and lie within eight.
static inline __attribute__((always_inline)) vf numbers(const int bits, const uint8_t *bytes, const uint8_t *end) {
    uint64_t all = bytes_at(bytes, end);
    uint32_t low = all, high = all >> (4 * bits);
    vu both = {low, low, low, low, high, high, high, high};
    both >>= (vu){0, bits, 2 * bits, 3 * bits, 0, bits, 2 * bits, 3 * bits};
    return __builtin_convertvector((vi)(both & ((1u << bits) - 1)) - (1 << (bits - 1)), vf);
}

// Rows of x lie apart by `padded` numbers; those behind the last column are zeros.
static inline __attribute__((always_inline)) void row_product(
    const int bits, const int count, const Packed *m, int64_t row, const float *x, int64_t padded, float *y
) {
    int64_t words = (m->columns * bits + 31) / 32, each = m->columns / m->groups, left = 0;
    const uint8_t *bytes = (const uint8_t *)(m->words + row * words), *end = (const uint8_t *)(m->words + m->rows * words);
    const uint16_t *scales = m->scale + row * m->groups, *last = scales + m->groups;
    vf all[2][MOST] = {0};
    float scale = 0;
    for (int64_t column = 0; column < padded; column += EACH, bytes += EACH * bits / 8) {
        if (left <= 0 && scales < last) scale = number(*scales++), left = each;
        left -= EACH;
        for (int part = 0; part < 2; part++) {
            vf some = numbers(bits, bytes + part * bits, end) * scale, own;
            const float *from = x + column + part * LANES;
            for (int t = 0; t < count; t++) memcpy(&own, from + t * padded, sizeof own), all[part][t] += some * own;
        }
    }
    for (int t = 0; t < count; t++) {
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += all[0][t][i] + all[1][t][i];
        y[t * m->rows + row] = sum;
    }
}

#define WIDTHS(bits, call) \
    switch (bits) { \
        case 2: call(2) break; \
        case 3: call(3) break; \
        case 4: call(4) break; \
        case 5: call(5) break; \
        case 6: call(6) break; \
        default: call(8) break; \
    }

// Up to MOST rows of x, padded, times a matrix. Groups are of a multiple of EACH columns, or one is a whole row.
void headwise_packed(const Packed *m, const float *x, float *y, int64_t count, int64_t padded, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m->rows * m->columns >= 1 << 16)
    for (int64_t row = 0; row < m->rows; row++) {
#define ONE(bits) if (count == 1) row_product(bits, 1, m, row, x, padded, y); \
                  else row_product(bits, MOST, m, row, x, padded, y);
        WIDTHS(m->bits, ONE)
    }
}

static inline __attribute__((always_inline)) void row_numbers(const int bits, const Packed *m, int64_t row, float *out) {
    int64_t words = (m->columns * bits + 31) / 32, each = m->columns / m->groups, left = 0;
    const uint8_t *bytes = (const uint8_t *)(m->words + row * words), *end = (const uint8_t *)(m->words + m->rows * words);
    const uint16_t *scales = m->scale + row * m->groups, *last = scales + m->groups;
    float scale = 0;
    for (int64_t column = 0; column < m->columns; column += LANES, bytes += bits) {
        if (left <= 0 && scales < last) scale = number(*scales++), left = each;
        left -= LANES;
        vf some = numbers(bits, bytes, end) * scale;
        int64_t rest = m->columns - column;
        if (rest >= LANES) memcpy(out + column, &some, sizeof some);
        else memcpy(out + column, &some, 4 * rest);
    }
}

// Some rows of a matrix, in numbers.
void headwise_unpacked(const Packed *m, int64_t first, int64_t count, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * m->columns >= 1 << 16)
    for (int64_t row = 0; row < count; row++) {
#define NUMBERS(bits) row_numbers(bits, m, first + row, out + row * m->columns);
        WIDTHS(m->bits, NUMBERS)
    }
}

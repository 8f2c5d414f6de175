// Products with a matrix in few bits, on a CPU. Compiled together with native.c and called by packed.py.
//
// 32 neighbours in a row fill as many words as they have bits, without gaps; rows begin at a new word. A number is
// stored with half of its range added. Neighbours of a group share a scale, of which 16 bits (bfloat16) are stored.

#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 32
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

#if defined(__clang__)
static inline vu picked(vu from, vu at) {
    vu found;
    for (int i = 0; i < LANES; i++) found[i] = from[at[i]];
    return found;
}
#else
#define picked __builtin_shuffle
#endif

static inline float number(uint16_t scale) {
    uint32_t bits = (uint32_t)scale << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// Half of a block: LANES whole numbers.
static inline vf half_block(const int bits, vu words, const int half) {
    vu first, shift;
    for (int i = 0; i < LANES; i++) first[i] = (half * LANES + i) * bits;
    shift = first & 31, first >>= 5;
    vu low = picked(words, first) >> shift, high = (picked(words, (first + 1) & (LANES - 1)) << 1) << (31 - shift);
    return __builtin_convertvector((vi)((low | high) & ((1u << bits) - 1)) - (1 << (bits - 1)), vf);
}

// Words from a place on, of which the first of every block are its own. Behind the last one of the matrix are zeros.
static inline vu words_at(const uint32_t *words, int64_t left) {
    vu found = {0};
    if (left >= LANES) memcpy(&found, words, sizeof found);
    else memcpy(&found, words, 4 * left);
    return found;
}

// Rows of x lie apart by `padded` numbers; those behind the last column are zeros.
static inline __attribute__((always_inline)) void row_product(
    const int bits, const int count, const Packed *m, int64_t row, const float *x, int64_t padded, float *y
) {
    int64_t words = (m->columns * bits + 31) / 32, each = m->columns / m->groups, blocks = padded / BLOCK, left = 0;
    const uint32_t *line = m->words + row * words;
    const uint16_t *scales = m->scale + row * m->groups, *last = scales + m->groups;
    vf all[2][MOST] = {0};
    float scale = 0;
    for (int64_t block = 0; block < blocks; block++) {
        vu here = words_at(line + block * bits, m->rows * words - row * words - block * bits);
        for (int half = 0; half < 2; half++) {
            if (left <= 0 && scales < last) scale = number(*scales++), left = each;
            left -= LANES;
            vf some = half_block(bits, here, half) * scale, own;
            const float *column = x + block * BLOCK + half * LANES;
            for (int t = 0; t < count; t++) memcpy(&own, column + t * padded, sizeof own), all[half][t] += some * own;
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

// Up to MOST rows of x, padded, times a matrix. Groups are of a multiple of LANES columns, or one is a whole row.
void headwise_packed(const Packed *m, const float *x, float *y, int64_t count, int64_t padded, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m->rows * m->columns >= 1 << 16)
    for (int64_t row = 0; row < m->rows; row++) {
#define ONE(bits) if (count == 1) row_product(bits, 1, m, row, x, padded, y); \
                  else row_product(bits, MOST, m, row, x, padded, y);
        WIDTHS(m->bits, ONE)
    }
}

static inline __attribute__((always_inline)) void row_numbers(const int bits, const Packed *m, int64_t row, float *out) {
    int64_t words = (m->columns * bits + 31) / 32, each = m->columns / m->groups, left = 0, at = row * words;
    const uint16_t *scales = m->scale + row * m->groups, *last = scales + m->groups;
    float scale = 0;
    for (int64_t block = 0; block * BLOCK < m->columns; block++) {
        vu here = words_at(m->words + at + block * bits, m->rows * words - at - block * bits);
        for (int half = 0; half < 2; half++) {
            if (left <= 0 && scales < last) scale = number(*scales++), left = each;
            left -= LANES;
            vf some = half_block(bits, here, half) * scale;
            int64_t column = block * BLOCK + half * LANES, rest = m->columns - column;
            if (rest >= LANES) memcpy(out + column, &some, sizeof some);
            else if (rest > 0) memcpy(out + column, &some, 4 * rest);
        }
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

// Rows of numbers as bytes, on a CPU. Compiled together with native.c and called by native.py.
//
// Bytes and scales are those of runtime/coder_headwise.py, to the last bit: products are rounded before they are
// added. Vectors run over tokens.

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <float.h>
#include <string.h>

#include "coder.h"

static inline vf choose(vi those, vf x, vf y) { return (vf)(((vi)x & those) | ((vi)y & ~those)); }

static inline vf within(vf x, float least, float most) {
    x = choose(x < least, (vf){0} + least, x);
    return choose(x > most, (vf){0} + most, x);
}

void headwise_tile(const float *x, int64_t token, int count, int size, const float *gain, vf *tile) {
    float *to = (float *)tile;
    memset(tile, 0, size * sizeof(vf));
    for (int t = 0; t < count; t++)
        for (int k = 0; k < size; k++) to[k * LANES + t] = x[t * token + k];
    for (int k = 0; k < size; k++) {
        vf own = gain ? tile[k] * gain[k] : tile[k];
        tile[k] = within(choose(own == own, own, (vf){0}), -FLT_MAX, FLT_MAX);
    }
}

static inline vf largest(const vf *tile, int begin, int end) {
    vf most = {0};
    for (int k = begin; k < end; k++) {
        vf size = (vf)((vi)tile[k] & INT32_MAX);
        most = choose(size > most, size, most);
    }
    return most;
}

void headwise_encode(const Coder *c, const vf *tile, int count, uint8_t *out, int64_t stride, float *numbers) {
    vb bytes[c->bytes + 1];
    vf found[c->size + 1];
    memset(bytes, 0, sizeof bytes);
    for (int g = 0; g < c->groups; g++) {
        int begin = g * c->each, end = begin + c->each < c->kept ? begin + c->each : c->kept;
        vf most = begin < end ? largest(tile, begin, end) : largest(tile, 0, 1), factor;  // empty groups have scales too
        for (int t = 0; t < LANES; t++) {
            int scale = 0;
            for (int half = 128; half; half /= 2) scale += most[t] > c->edges[scale + half - 1] ? half : 0;
            bytes[c->codes + g][t] = scale;
            factor[t] = c->factors[scale];
        }
        for (int k = begin; k < end; k++) {
            vf up = tile[k] / factor * c->slope[k];
            vi code = __builtin_convertvector(within(c->half[k] + up, 0, c->most[k]), vi);
            for (int f = c->first[k]; f < c->first[k + 1]; f++)
                bytes[c->byte[f]] |= __builtin_convertvector(((code >> c->below[f]) & c->mask[f]) << c->up[f], vb);
            found[k] = (__builtin_convertvector(code, vf) - c->middle[k]) * c->step[k] * factor;
        }
    }
    for (int n = 0; n < c->bytes; n++) memcpy(out + n * stride, &bytes[n], count);
    for (int t = 0; numbers && t < count; t++, numbers += c->size) {
        for (int k = 0; k < c->kept; k++) numbers[k] = found[k][t];
        for (int k = c->kept; k < c->size; k++) numbers[k] = 0;
    }
}

// Rows (count, tokens, columns of all parts) as bytes of several coders (count, bytes of all, tokens), and as what these
// stand for (count, tokens, size). A coder's coefficients begin at its first column.
void headwise_rows(
    const Coder *const *coders, const int64_t *firsts, int64_t number, const float *const *parts, const int64_t *columns,
    int64_t given, int64_t count, int64_t tokens, uint8_t *bytes, float *const *numbers, int threads
) {
    int64_t blocks = (tokens + LANES - 1) / LANES, all = 0, wide = 0;
    for (int i = 0; i < number; i++) all += coders[i]->bytes;
    for (int i = 0; i < given; i++) wide += columns[i];
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * tokens * wide >= 1 << 14)
    for (int64_t unit = 0; unit < count * blocks; unit++) {
        int64_t row = unit / blocks, place = unit % blocks * LANES, left = tokens - place;
        uint8_t *out = bytes + row * all * tokens + place;
        vf tiles[wide], *tile = tiles;
        left = left < LANES ? left : LANES;
        for (int i = 0; i < given; tile += columns[i++])
            headwise_tile(parts[i] + (row * tokens + place) * columns[i], columns[i], left, columns[i], 0, tile);
        for (int i = 0; i < number; out += coders[i++]->bytes * tokens) {
            float *to = numbers[i] + (row * tokens + place) * coders[i]->size;
            headwise_encode(coders[i], tiles + firsts[i], left, out, tokens, to);
        }
    }
}

// Coders of rows in bits, as native.c and coder.c take them from native.py.

#include <stdint.h>

#define LANES 16  // tokens of a vector

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

typedef struct {  // fields of bytes, coefficient by coefficient: those of k begin at first[k]
    int32_t kept, size, groups, each, codes, bytes;
    const int32_t *first, *byte, *mask, *below, *up;
    const uint8_t *those;  // of a byte's bits
    const float *power;    // what a field is times in a code
    const float *most, *slope, *half, *step, *middle;  // of every coefficient
    const float *edges, *factors;  // largest numbers of the first 255 scales; all 256 scales
} Coder;

// Up to LANES tokens, a vector for every coefficient, times gains if there are any.
void headwise_tile(const float *x, int64_t token, int count, int size, const float *gain, vf *tile);

// Codes and scales of such tokens, byte by byte; and what they stand for, token by token, if that is asked for.
void headwise_encode(const Coder *c, const vf *tile, int count, uint8_t *out, int64_t stride, float *numbers);

// One new token of every text against a cache in bits, on a CPU. Compiled and called by native.py.
//
// Rows are those of runtime/coder_headwise.py: one byte of all tokens lies together, so vectors run over tokens.
// A text's tokens are read in chunks, by any thread: each finds its own largest score, and `read` joins them.
// Functions with `omp for` are called by all threads at once, which share their work and wait for each other.
// Chunks read up to 15 places behind their last one: newer tokens always lie there.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coder.h"

#define HEADS 8    // that are read together
#define CHUNK 512  // tokens, at most
#define BLOCKS (CHUNK / LANES)
#define TILE 4     // rows of a matrix that are multiplied together
#define PIECES 4   // of a matrix that is shared by heads, for threads

typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));

typedef struct {  // strides are in elements
    const Coder *coder, *fine;
    const float *gain;    // what new rows are multiplied with (groups, size), or none
    uint8_t *rows;        // (texts, groups, bytes, places)
    const uint8_t *old;   // rows in more bits before this step: the oldest that stays
    uint8_t *near;        // and after it (texts, groups, bytes, near)
    const float *starts;  // (texts, groups, whole, size)
    int64_t row_text, row_group, row_byte, old_text, old_group, old_byte, old_token;
} Side;

static void write(const Side *s, const float *x, int64_t text, int64_t groups, int64_t group, int64_t place, int64_t near) {
    const float *gain = s->gain ? s->gain + group * s->coder->size : 0;
    const uint8_t *old = s->old + text * s->old_text + group * s->old_group;
    uint8_t *new = s->near + (text * groups + group) * s->fine->bytes * near;
    x += (text * groups + group) * s->coder->size;
    vf tile[s->coder->size];
    headwise_tile(x, 0, 1, s->coder->size, gain, tile);
    headwise_encode(s->coder, tile, 1, s->rows + text * s->row_text + group * s->row_group + place, s->row_byte, 0);
    for (int n = 0; n < s->fine->bytes; n++)
        if (s->old_token == 1) memcpy(new + n * near, old + n * s->old_byte, near - 1);
        else for (int64_t t = 0; t < near - 1; t++) new[n * near + t] = old[n * s->old_byte + t * s->old_token];
    headwise_encode(s->fine, tile, 1, new + near - 1, near, 0);
}

// Codes of a coefficient less their middle, of some tokens.
static inline vf unpacked(const Coder *c, int k, const uint8_t *rows, int64_t stride) {
    vf found = (vf){0} - c->middle[k];
    for (int f = c->first[k]; f < c->first[k + 1]; f++) {
        vb byte;
        memcpy(&byte, rows + c->byte[f] * stride, LANES);
        byte &= c->those[f];
        found += __builtin_convertvector(__builtin_convertvector(byte, vi), vf) * c->power[f];
    }
    return found;
}

static inline vf scales(const Coder *c, int g, const uint8_t *rows, int64_t stride) {
    float found[LANES];
    vf all;
    for (int t = 0; t < LANES; t++) found[t] = c->factors[rows[(c->codes + g) * stride + t]];
    memcpy(&all, found, sizeof all);
    return all;
}

static inline float total(vf x) {
    vf8 eight[2];
    vf4 four[2];
    memcpy(eight, &x, sizeof x);
    eight[0] += eight[1];
    memcpy(four, eight, sizeof eight[0]);
    four[0] += four[1];
    return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

static inline vf exponential(vf x) {  // of numbers up to 0; far below, nothing is left
    vf n = __builtin_convertvector(__builtin_convertvector(x * 1.44269504f - 0.5f, vi), vf);
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f, p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = (((p * r + 4.1666667e-2f) * r + 1.6666667e-1f) * r + 0.5f) * r * r + r + 1.0f;
    p *= (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return (vf)((vi)p & ~(x <= -87.0f));
}

// Scores of heads for LANES tokens. Queries lie head by head of a coefficient, times its step.
// Meanwhile a quarter of the lines of the next keys, and of the values, come near.
static inline void score(
    const int heads, const Coder *c, const uint8_t *rows, int64_t stride, const float *q, vf *out,
    const uint8_t *soon, const uint8_t *later, int64_t later_stride, int quarter
) {
    vf sums[HEADS] = {0};
    for (int g = 0; g < c->groups; g++) {
        vf own[HEADS] = {0}, scale = scales(c, g, rows, stride);
        int end = (g + 1) * c->each < c->kept ? (g + 1) * c->each : c->kept;
        for (int k = g * c->each; k < end; k++) {
            vf x = unpacked(c, k, rows, stride);
            for (int h = 0; h < heads; h++) own[h] += x * q[k * HEADS + h];
            if (k % 4 == quarter) __builtin_prefetch(soon + k * stride), __builtin_prefetch(later + k * later_stride);
        }
        for (int h = 0; h < heads; h++) sums[h] += own[h] * scale;
    }
    for (int h = 0; h < heads; h++) out[h * BLOCKS] = sums[h];
}

// Sums of a coefficient, times weights of heads.
static inline void mix(const int heads, const vf *x, const vf *weights, int blocks, float step, float *z, int size) {
    vf sums[HEADS] = {0};
    for (int t = 0; t < blocks; t++)
        for (int h = 0; h < heads; h++) sums[h] += x[t] * weights[h * BLOCKS + t];
    for (int h = 0; h < heads; h++) z[h * size] = total(sums[h]) * step;
}

#define FOR_HEADS(heads, call) /* with a number of heads that the compiler knows: sums stay in registers */ \
    switch (heads) { \
        case 1: { enum { N = 1 }; call; } break; \
        case 2: { enum { N = 2 }; call; } break; \
        case 3: { enum { N = 3 }; call; } break; \
        case 4: { enum { N = 4 }; call; } break; \
        case 5: { enum { N = 5 }; call; } break; \
        case 6: { enum { N = 6 }; call; } break; \
        case 7: { enum { N = 7 }; call; } break; \
        default: { enum { N = 8 }; call; } \
    }

typedef struct {  // a layer's own weights, or none where torch multiplies with them
    const float *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias;  // (rows, columns)
    const float *q_down, *k_down, *mean, *up;                        // (groups, width, size)
    int64_t hidden, width, pools, own, output;  // columns, width of a head, its groups; of its values; rows of o
} Layer;

typedef struct {  // what the new token of every text writes and reads
    const Side *k, *v;
    const float *x[3];  // its hidden row, or queries, keys and values
    const float *cosine, *sine;  // of all texts or of one, or none (texts, turned)
    float *out;
    const uint8_t *seen;   // either of these masks, or none (texts, tokens)
    const float *added;
    const int64_t *padding;  // of texts, or none
    float scaling;
    int64_t texts, groups, heads, tokens, near, whole, mask_text, turned, angles;
} Step;

static float masked(const Step *s, int64_t text, int64_t place) {
    if (s->seen) return s->seen[text * s->mask_text + place] ? 0 : -INFINITY;
    return s->added ? s->added[text * s->mask_text + place] : 0;
}

// Weights in place of scores (heads, count), without their sum; that and the largest score lie before z.
static void soften(int heads, int blocks, vf *scores, float *found, int size) {
    for (int h = 0; h < heads; h++, found += size + 2, scores += BLOCKS) {
        vf best = scores[0], sum = {0};
        for (int t = 1; t < blocks; t++) {
            vi more = scores[t] > best;
            best = (vf)(((vi)scores[t] & more) | ((vi)best & ~more));
        }
        float most = best[0];
        for (int i = 1; i < LANES; i++) most = fmaxf(most, best[i]);
        for (int t = 0; t < blocks; t++) sum += scores[t] = exponential(scores[t] - (most == -INFINITY ? 0 : most));
        found[0] = most, found[1] = total(sum);
    }
}

// Tokens from a place on, in codes.
static void read_codes(
    const Step *s, int64_t text, int64_t group, int heads, const float *q, int near, int64_t place, int64_t count, float *found
) {
    const Side *sides[2] = {s->k, s->v};
    const Coder *coders[2];
    const uint8_t *rows[2];
    int64_t strides[2], skip = near ? s->tokens : place - (s->padding ? s->padding[text] : 0);
    int blocks = (count + LANES - 1) / LANES, size = s->v->coder->size;
    for (int i = 0; i < 2; i++) {
        coders[i] = near ? sides[i]->fine : sides[i]->coder;
        strides[i] = near ? s->near : sides[i]->row_byte;
        rows[i] = near ? sides[i]->near + (text * s->groups + group) * coders[i]->bytes * s->near
                       : sides[i]->rows + text * sides[i]->row_text + group * sides[i]->row_group + place;
    }
    vf scores[HEADS * BLOCKS], weights[HEADS * BLOCKS], x[BLOCKS];
    float asked[coders[0]->kept * HEADS + 1];
    for (int k = 0; k < coders[0]->kept; k++)
        for (int h = 0; h < heads; h++) {
            float own = q[h * s->k->coder->size + k] * s->scaling * coders[0]->step[k];
            asked[k * HEADS + h] = s->k->gain ? own / s->k->gain[group * s->k->coder->size + k] : own;
        }
    for (int t = 0; t < blocks; t++) {
        const uint8_t *soon = rows[0] + (t + 4) * LANES, *later = rows[1] + t / 4 * 4 * LANES;
        FOR_HEADS(heads, score(N, coders[0], rows[0] + t * LANES, strides[0], asked, scores + t, soon, later, strides[1], t % 4))
    }
    for (int64_t t = 0; t < blocks * LANES; t++) {
        int hidden = t >= count || (skip + t >= 0 && skip + t < s->whole);
        float more = hidden ? -INFINITY : masked(s, text, place + t);
        if (more != 0)
            for (int h = 0; h < heads; h++) {
                float *one = (float *)(scores + h * BLOCKS) + t;
                *one = hidden ? more : *one + more;
            }
    }
    soften(heads, blocks, scores, found, size);
    for (int h = 0; h < heads; h++)
        for (int k = coders[1]->kept; k < size; k++) found[h * (size + 2) + 2 + k] = 0;
    for (int g = 0; g < coders[1]->groups; g++) {
        int end = (g + 1) * coders[1]->each < coders[1]->kept ? (g + 1) * coders[1]->each : coders[1]->kept;
        for (int t = 0; t < blocks; t++) {
            vf scale = scales(coders[1], g, rows[1] + t * LANES, strides[1]);
            for (int h = 0; h < heads; h++) weights[h * BLOCKS + t] = scores[h * BLOCKS + t] * scale;
        }
        for (int k = g * coders[1]->each; k < end; k++) {
            for (int t = 0; t < blocks; t++) x[t] = unpacked(coders[1], k, rows[1] + t * LANES, strides[1]);
            FOR_HEADS(heads, mix(N, x, weights, blocks, coders[1]->step[k], found + 2 + k, size + 2))
        }
    }
}

// The first tokens of a text, which are kept as they are.
static void read_starts(const Step *s, int64_t text, int64_t group, int heads, const float *q, float *found) {
    int64_t row = (text * s->groups + group) * s->whole, place = s->padding ? s->padding[text] : 0;
    int qk = s->k->coder->size, size = s->v->coder->size;
    const float *gain = s->k->gain ? s->k->gain + group * qk : 0;
    for (int h = 0; h < heads; h++, q += qk, found += size + 2) {
        found[0] = -INFINITY, found[1] = 0;
        memset(found + 2, 0, size * sizeof(float));
        for (int64_t t = 0; t < s->whole; t++) {
            const float *k = s->k->starts + (row + t) * qk, *v = s->v->starts + (row + t) * size;
            float sum = 0, more = masked(s, text, place + t);
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < qk; i++) sum += k[i] * (gain ? q[i] / gain[i] : q[i]);
            if (more == -INFINITY) continue;
            sum = sum * s->scaling + more;
            float most = fmaxf(found[0], sum), old = expf(found[0] - most), own = expf(sum - most);
            found[0] = most, found[1] = found[1] * old + own;
            for (int i = 0; i < size; i++) found[2 + i] = found[2 + i] * old + own * v[i];
        }
    }
}

// Parts of every row that is read: chunks of coded tokens, near ones, and first ones.
static int64_t parts_of(const Step *s, int threads, int64_t *each) {
    int64_t far = s->tokens - s->near, rows = s->texts * s->groups * ((s->heads + HEADS - 1) / HEADS);
    int64_t least = (threads + rows - 1) / rows, chunks = (far + CHUNK - 1) / CHUNK;
    chunks = chunks < least && far >= least * 64 ? least : chunks;  // all threads have work
    *each = ((far + chunks - 1) / chunks + LANES - 1) / LANES * LANES;
    return chunks + 2;
}

static void read(const Step *s, const float *asked, float *mixed, int threads, float *found) {
    int64_t far = s->tokens - s->near, size = s->v->coder->size, sets = (s->heads + HEADS - 1) / HEADS, each;
    int64_t rows = s->texts * s->groups * sets, parts = parts_of(s, threads, &each), length = (size + 2) * HEADS;
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < rows * parts; unit++) {
        int64_t part = unit % parts, row = unit / parts, group = row / sets % s->groups, text = row / sets / s->groups;
        int64_t first = row % sets * HEADS, begin = part * each, left = far - begin;
        int heads = s->heads - first < HEADS ? s->heads - first : HEADS;
        const float *q = asked + ((text * s->groups + group) * s->heads + first) * s->k->coder->size;
        float *own = found + unit * length;
        if (part == parts - 1) read_starts(s, text, group, heads, q, own);
        else if (part == parts - 2) read_codes(s, text, group, heads, q, 1, far, s->near, own);
        else if (left > 0) read_codes(s, text, group, heads, q, 0, begin, left < each ? left : each, own);
        else for (int h = 0; h < heads; h++) memset(own + h * (size + 2), 0, (size + 2) * 4), own[h * (size + 2)] = -INFINITY;
    }
#pragma omp for
    for (int64_t head = 0; head < s->texts * s->groups * s->heads; head++) {
        int64_t group = head / s->heads % s->groups, own = head % s->heads, row = head / s->heads * sets + own / HEADS;
        const float *one = found + row * parts * length + own % HEADS * (size + 2), *gain = s->v->gain;
        float most = -INFINITY, sum = 0, *z = mixed + head * size;
        for (int p = 0; p < parts; p++) most = fmaxf(most, one[p * length]);
        memset(z, 0, size * sizeof(float));
        for (int p = 0; p < parts; p++) {
            float times = one[p * length] == -INFINITY ? 0 : expf(one[p * length] - most);
            sum += times * one[p * length + 1];
            for (int i = 0; i < size; i++) z[i] += times * one[p * length + 2 + i];
        }
        for (int i = 0; i < size; i++) z[i] /= sum * (gain ? gain[group * size + i] : 1);
    }
}

// Rows (texts, columns) times a matrix (rows, columns), and a bias (rows).
static void linear(
    const float *x, const float *matrix, const float *bias, float *y, int64_t texts, int64_t rows, int64_t columns
) {
#pragma omp for nowait
    for (int64_t row = 0; row < rows; row += TILE)
        for (int64_t b = 0; b < texts; b++) {
            int64_t left = rows - row < TILE ? rows - row : TILE, c = 0;
            const float *own = x + b * columns, *lines[TILE];
            vf sums[TILE] = {0}, some, line;
            for (int i = 0; i < TILE; i++) lines[i] = matrix + (row + (i < left ? i : 0)) * columns;
            for (; c + LANES <= columns; c += LANES) {
                memcpy(&some, own + c, sizeof some);
                for (int i = 0; i < TILE; i++) memcpy(&line, lines[i] + c, sizeof line), sums[i] += some * line;
            }
            for (int i = 0; i < left; i++) {
                float sum = total(sums[i]) + (bias ? bias[row + i] : 0);
                for (int64_t rest = c; rest < columns; rest++) sum += own[rest] * lines[i][rest];
                y[b * rows + row + i] = sum;
            }
        }
}

// Pairs of a head's coordinates, j and j + half, by the angles of its text.
static void turn(float *x, int64_t turned, const float *cosine, const float *sine) {
    for (int64_t j = 0, half = turned / 2; j < half; j++) {
        float first = x[j], second = x[j + half];
        x[j] = first * cosine[j] - second * sine[j];
        x[j + half] = second * cosine[j + half] + first * sine[j + half];
    }
}

// Rows (texts, groups * heads, width) times the matrix of their group (groups, width, size), less a mean (groups, size).
static void products(
    const float *x, int64_t x_head, const float *matrices, const float *mean, float *z,
    int64_t texts, int64_t groups, int64_t heads, int64_t width, int64_t size
) {
#pragma omp for nowait
    for (int64_t unit = 0; unit < texts * groups * PIECES; unit++) {  // heads of a group read the same piece of a matrix
        int64_t group = unit / PIECES % groups, first = unit / PIECES * heads, piece = (size + PIECES - 1) / PIECES;
        int64_t begin = unit % PIECES * piece, end = begin + piece < size ? begin + piece : size;
        for (int64_t head = first; head < first + heads; head++) {
            const float *own = x + head * x_head, *matrix = matrices + group * width * size;
            float *restrict found = z + head * size;
            for (int64_t k = begin; k < end; k++) found[k] = mean ? -mean[group * size + k] : 0;
            int64_t w = 0;
            for (; w + 4 <= width; w += 4, matrix += 4 * size)
                for (int64_t k = begin; k < end; k++)
                    found[k] += (own[w] * matrix[k] + own[w + 1] * matrix[size + k])
                                + (own[w + 2] * matrix[2 * size + k] + own[w + 3] * matrix[3 * size + k]);
            for (; w < width; w++, matrix += size)
                for (int64_t k = begin; k < end; k++) found[k] += own[w] * matrix[k];
        }
    }
}

// Writes the new token of every text and reads for it, in place of torch's own operations from where `x` begins.
// Returns 0, or 1 where there is no memory.
int headwise_token(const Layer *l, const Step *s, int threads) {
    int64_t groups = s->texts * s->groups, heads = groups * s->heads, each, parts = parts_of(s, threads, &each);
    int64_t keys = s->k->coder->size, values = s->v->coder->size, shared = s->groups * s->heads / l->pools;
    int64_t wide = l->pools / s->groups * l->width, sets = (s->heads + HEADS - 1) / HEADS;  // of a row of keys
    int64_t sizes[] = {heads * l->width, groups * wide, groups * values, heads * keys, groups * keys,
                       heads * values,   heads * l->own, groups * sets * parts * (values + 2) * HEADS};
    int64_t all = 0, work = s->texts * l->hidden * (l->width * s->heads + wide) * s->groups + s->tokens * heads * 256;
    float *room[8], *first;
    for (int i = 0; i < 8; i++) all += sizes[i];
    if (!(first = room[0] = malloc(all * sizeof(float)))) return 1;
    for (int i = 1; i < 8; i++) room[i] = room[i - 1] + sizes[i - 1];
    const float *q = l->q ? room[0] : s->x[0], *k = l->q ? room[1] : s->x[1], *v = l->q ? room[2] : s->x[2];
    float *mixed = l->up || l->o ? room[5] : s->out, *own = l->up ? l->o ? room[6] : s->out : mixed;
#pragma omp parallel num_threads(threads) if (threads > 1 && work >= 1 << 16)
    {
        if (l->q) {
            linear(s->x[0], l->q, l->q_bias, room[0], s->texts, s->groups * s->heads * l->width, l->hidden);
            linear(s->x[0], l->k, l->k_bias, room[1], s->texts, s->groups * wide, l->hidden);
            linear(s->x[0], l->v, l->v_bias, room[2], s->texts, s->groups * values, l->hidden);
#pragma omp barrier
#pragma omp for
            for (int64_t i = 0; i < heads + groups * (wide / l->width); i++) {
                int64_t text = i < heads ? i / (s->groups * s->heads) : (i - heads) / l->pools;
                float *x = i < heads ? room[0] + i * l->width : room[1] + (i - heads) * l->width;
                if (s->turned) turn(x, s->turned, s->cosine + text * s->angles, s->sine + text * s->angles);
            }
        }
        if (l->q_down) {
            products(q, l->width, l->q_down, 0, room[3], s->texts, l->pools, shared, l->width, keys);
            products(k, wide, l->k_down, l->mean, room[4], s->texts, s->groups, 1, wide, keys);
#pragma omp barrier
        }
#pragma omp for
        for (int64_t i = 0; i < groups * 2; i++) {
            int64_t text = i / 2 / s->groups, group = i / 2 % s->groups, place = s->tokens - 1;
            if (i % 2) write(s->v, v, text, s->groups, group, place, s->near);
            else write(s->k, l->q_down ? room[4] : k, text, s->groups, group, place, s->near);
        }
        read(s, l->q_down ? room[3] : q, mixed, threads, room[7]);
        if (l->up) {
            products(mixed, values, l->up, 0, own, s->texts, l->pools, shared, values, l->own);
#pragma omp barrier
        }
        if (l->o) linear(own, l->o, l->o_bias, s->out, s->texts, l->output, s->groups * s->heads * l->own);
    }
    free(first);
    return 0;
}

// Few rows times a matrix, which is read once for all of them.
void headwise_linear(
    const float *x, const float *matrix, const float *bias, float *y, int64_t texts, int64_t rows, int64_t columns, int threads
) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * columns >= 1 << 16)
    linear(x, matrix, bias, y, texts, rows, columns);
}

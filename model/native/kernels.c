/*
 * What a transformer layer needs besides its matrix products, for float32 and bfloat16 on a CPU: norm, rotary
 * embedding with the cache write, attention of single new tokens over the paged cache, and the gated unit.
 *
 * All arithmetic is float32; bfloat16 is only how numbers lie in memory. A row's result depends on that row alone,
 * so neither the number of rows nor of threads changes it. Written with the compilers' vector extension, which every
 * target lowers to what it has. kernels.py is the interface and holds the reference in torch.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

/* h (T, dim) float32 += delta (T, dim) if there is one; out = h / rms(h) * weight. */
void add_rms_norm(float *h, const void *delta, const float *weight, void *out, int64_t rows, int64_t dim, float eps,
                  int dtype) {
    for (int64_t t = 0; t < rows; t++) {
        float *row = h + t * dim;
        const int64_t base = t * dim;
        vec squares = splat(0);
        float rest = 0;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            vec x = load_f32(row + i);
            if (delta) store(row, i, x = x + load(delta, base + i, dtype), FLOAT32);
            squares += x * x;
        }
        for (; i < dim; i++) {
            if (delta) row[i] += get(delta, base + i, dtype);
            rest += row[i] * row[i];
        }
        const float scale = 1.0f / sqrtf((sum(squares) + rest) / (float)dim + eps);
        for (i = 0; i + LANES <= dim; i += LANES)
            store(out, base + i, load_f32(row + i) * splat(scale) * load_f32(weight + i), dtype);
        for (; i < dim; i++) put(out, base + i, row[i] * scale * weight[i], dtype);
    }
}

/* qkv (T, heads + 2 kv, dim): turns the pairs of q in place, writes the turned k and v to the cache rows `slots`.
 * table (positions, dim / 2) holds pairs (cos, sin). */
void rotate_and_store(void *qkv, const float *table, const int64_t *positions, const int64_t *slots, void *keys,
                      void *values, int64_t rows, int64_t heads, int64_t kv, int64_t dim, int dtype) {
    const int64_t width = (heads + 2 * kv) * dim, size = dtype == FLOAT32 ? 4 : 2;
    for (int64_t t = 0; t < rows; t++) {
        const float *turn = table + positions[t] * dim;
        const int64_t base = t * width, cache = slots[t] * kv * dim;
        for (int64_t head = 0; head < heads + kv; head++) {
            const int64_t from = base + head * dim;
            void *to = head < heads ? qkv : keys;
            const int64_t at = head < heads ? from : cache + (head - heads) * dim;
            int64_t i = 0;
#ifdef SHUFFLES
            for (; i + LANES <= dim; i += LANES) {
                const vec pairs = load(qkv, from + i, dtype), angle = load_f32(turn + i);
                const vec swapped = __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12,
                                                            15, 14);
                const vec cosine = __builtin_shufflevector(angle, angle, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12,
                                                           14, 14);
                const vec sine = __builtin_shufflevector(angle, -angle, 17, 1, 19, 3, 21, 5, 23, 7, 25, 9, 27, 11, 29,
                                                         13, 31, 15);
                store(to, at + i, pairs * cosine + swapped * sine, dtype);
            }
#endif
            for (; i < dim; i += 2) {
                const float a = get(qkv, from + i, dtype), b = get(qkv, from + i + 1, dtype);
                put(to, at + i, a * turn[i] - b * turn[i + 1], dtype);
                put(to, at + i + 1, a * turn[i + 1] + b * turn[i], dtype);
            }
        }
        memcpy((char *)values + cache * size, (char *)qkv + (base + (heads + kv) * dim) * size, kv * dim * size);
    }
}

/* out (T, hidden) = silu(gate) * up, from gate_up (T, 2 hidden). */
void silu_multiply(const void *gate_up, void *out, int64_t rows, int64_t hidden, int dtype) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t gate = t * 2 * hidden, up = gate + hidden;
        int64_t i = 0;
        for (; i + LANES <= hidden; i += LANES) {
            vec x = load(gate_up, gate + i, dtype);
            uvec positive = (uvec)(x > splat(0));
            vec e = exponential((vec)((positive & (uvec)-x) | (~positive & (uvec)x))); /* e^-|x| */
            vec numerator = (vec)((positive & (uvec)splat(1)) | (~positive & (uvec)e));
            store(out, t * hidden + i, x * numerator / (splat(1) + e) * load(gate_up, up + i, dtype), dtype);
        }
        for (; i < hidden; i++) {
            const float x = get(gate_up, gate + i, dtype);
            put(out, t * hidden + i, x / (1.0f + expf(-x)) * get(gate_up, up + i, dtype), dtype);
        }
    }
}

/* out (T, vocabulary) = logits (T, vocabulary), but those at most `margin` below their row's largest are computed again
 * as h (T, dim) times weight (vocabulary, dim) without rounding. out is float32, the rest bfloat16. */
void sharpen_logits(const uint16_t *logits, const uint16_t *h, const uint16_t *weight, float *out, int64_t rows,
                    int64_t vocabulary, int64_t dim, float margin) {
    for (int64_t t = 0; t < rows; t++) {
        const uint16_t *from = logits + t * vocabulary, *row = h + t * dim;
        float *to = out + t * vocabulary, top = -INFINITY;
        for (int64_t i = 0; i < vocabulary; i++) {
            to[i] = from_bfloat16(from[i]);
            top = to[i] > top ? to[i] : top;
        }
        const float floor = top - margin;
        for (int64_t start = 0; start < vocabulary; start += 64) {
            const int64_t end = start + 64 < vocabulary ? start + 64 : vocabulary;
            int any = 0;
            for (int64_t i = start; i < end; i++) any |= to[i] >= floor;
            for (int64_t i = start; any && i < end; i++) {
                if (!(to[i] >= floor)) continue;
                const uint16_t *column = weight + i * dim;
                vec total = splat(0);
                float rest = 0;
                int64_t d = 0;
                for (; d + LANES <= dim; d += LANES) total += load_bf16(row + d) * load_bf16(column + d);
                for (; d < dim; d++) rest += from_bfloat16(row[d]) * from_bfloat16(column[d]);
                to[i] = sum(total) + rest;
            }
        }
    }
}

typedef struct {
    const void *q, *keys, *values;
    void *out;
    const int32_t *lengths, *blocks;
    int64_t q_stride, table_width, kv, group, dim, block_tokens;
    float scale;
    int dtype;
} decode_job;

/* The cached tokens of one block: its first cache row, how many there are, and the next block's first row or -1. */
typedef struct {
    int64_t row, count, next;
} piece;

static inline piece piece_at(const decode_job *job, const int32_t *table, int64_t start, int64_t n) {
    const int64_t left = n - start, size = job->block_tokens, block = start / size;
    return (piece){table[block] * size, left < size ? left : size, left > size ? table[block + 1] * size : -1};
}

/* Blocks lie anywhere, so the hardware doesn't foresee the next one. */
static inline void prefetch_rows(const void *base, int64_t at, int64_t stride, int64_t dim, int dtype) {
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t byte = 0; byte < dim * size; byte += 64)
            __builtin_prefetch((const char *)base + (at + i * stride) * size + byte);
}

/* One sequence's group of heads: dtype, dim and group are constants where the caller inlines them. */
static inline __attribute__((always_inline)) void attend(const decode_job *job, int64_t sequence, int64_t head,
                                                         float *scratch, const int dtype, const int64_t dim,
                                                         const int64_t group) {
    const int64_t n = job->lengths[sequence], padded = (n + LANES - 1) / LANES * LANES, chunks = dim / LANES;
    const int32_t *table = job->blocks + sequence * job->table_width;
    float *q = scratch, *scores = scratch + group * dim;
    const int64_t from = sequence * job->q_stride + head * group * dim, stride = job->kv * dim;
    for (int64_t i = 0; i < group * dim; i++) q[i] = get(job->q, from + i, dtype) * job->scale;
    for (int64_t start = 0; start < n; start += job->block_tokens) {
        const piece p = piece_at(job, table, start, n);
        if (p.next >= 0) prefetch_rows(job->keys, p.next * stride + head * dim, stride, dim, dtype);
        vec products[group * LANES];
        for (int64_t i = 0; i < LANES; i++) {
            /* The last block's free rows are read too; their scores are never used. */
            const int64_t at = (p.row + i) * stride + head * dim;
            const vec first = load(job->keys, at, dtype);
            for (int64_t g = 0; g < group; g++) products[g * LANES + i] = load_f32(q + g * dim) * first;
            for (int64_t c = 1; c < chunks; c++) {
                const vec key = load(job->keys, at + c * LANES, dtype);
                for (int64_t g = 0; g < group; g++)
                    products[g * LANES + i] += load_f32(q + g * dim + c * LANES) * key;
            }
        }
        for (int64_t g = 0; g < group; g++) store(scores, g * padded + start, sums(products + g * LANES), FLOAT32);
    }
    float scale[group];
    for (int64_t g = 0; g < group; g++) scale[g] = softmax(scores + g * padded, n);
    const int64_t to = (sequence * job->kv + head) * group * dim;
    const int64_t most = group >= LANES ? 1 : LANES / group, wide = most < chunks ? most : chunks;
    for (int64_t first = 0; first < chunks; first += wide) {
        const int64_t width = chunks - first < wide ? chunks - first : wide;
        vec total[group * wide];
        for (int64_t k = 0; k < group * wide; k++) total[k] = splat(0);
        for (int64_t start = 0; start < n; start += job->block_tokens) {
            const piece p = piece_at(job, table, start, n);
            const int64_t lane = head * dim + first * LANES;
            if (p.next >= 0) prefetch_rows(job->values, p.next * stride + lane, stride, width * LANES, dtype);
            for (int64_t i = 0; i < p.count; i++) {
                const int64_t at = (p.row + i) * stride + lane;
                for (int64_t c = 0; c < width; c++) {
                    const vec value = load(job->values, at + c * LANES, dtype);
                    for (int64_t g = 0; g < group; g++)
                        total[c * group + g] += splat(scores[g * padded + start + i]) * value;
                }
            }
        }
        for (int64_t c = 0; c < width; c++)
            for (int64_t g = 0; g < group; g++)
                store(job->out, to + g * dim + (first + c) * LANES, total[c * group + g] * splat(scale[g]), dtype);
    }
}

static void attend_any(const decode_job *job, int64_t sequence, int64_t head, float *scratch) {
#define CASE(DTYPE, DIM, GROUP)                                             \
    if (job->dtype == DTYPE && job->dim == DIM && job->group == GROUP) {    \
        attend(job, sequence, head, scratch, DTYPE, DIM, GROUP);            \
        return;                                                             \
    }
    CASE(BFLOAT16, 64, 3)
    CASE(BFLOAT16, 64, 4)
    CASE(BFLOAT16, 64, 8)
    CASE(BFLOAT16, 128, 1)
    CASE(BFLOAT16, 128, 4)
    CASE(BFLOAT16, 128, 8)
    CASE(FLOAT32, 64, 3)
    CASE(FLOAT32, 64, 8)
    CASE(FLOAT32, 128, 1)
#undef CASE
    if (job->dtype == BFLOAT16) attend(job, sequence, head, scratch, BFLOAT16, job->dim, job->group);
    else attend(job, sequence, head, scratch, FLOAT32, job->dim, job->group);
}

/* Attention of one new token per sequence over its `lengths` cached tokens (its own among them).
 * q (B, kv * group, dim) with rows q_stride apart, out (B, kv * group, dim) dense, keys and values (rows, kv, dim);
 * blocks (B, table_width) numbers of cache blocks. dim is a multiple of 16, block_tokens is 16, no length is 0.
 * Returns 0, or 1 without memory. */
int paged_decode(const void *q, int64_t q_stride, const void *keys, const void *values, void *out,
                 const int32_t *lengths, const int32_t *blocks, int64_t sequences, int64_t table_width, int64_t kv,
                 int64_t group, int64_t dim, int64_t block_tokens, float scale, int dtype, int threads) {
    const decode_job job = {q, keys, values, out, lengths, blocks, q_stride, table_width, kv, group, dim,
                            block_tokens, scale, dtype};
    int64_t longest = 0, work = 0;
    for (int64_t s = 0; s < sequences; s++) {
        work += lengths[s];
        if (lengths[s] > longest) longest = lengths[s];
    }
    int failed = 0;
    const size_t floats = group * dim + group * (longest + LANES);
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && work * kv * group > 2000)
#endif
    {
        float *scratch = malloc(floats * sizeof(float));
        if (!scratch) failed = 1;
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1)
#endif
        for (int64_t item = 0; item < sequences * kv; item++)
            if (scratch) attend_any(&job, item / kv, item % kv, scratch);
        free(scratch);
    }
    return failed;
}

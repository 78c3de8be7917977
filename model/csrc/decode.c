/*
 * Attention of single new tokens over the paged cache, for float32 and bfloat16. A sequence's result depends on that
 * sequence alone: neither the number of others nor of threads changes it. All sums are float32.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define PAIRS
static inline vec add_pairs_of(vec total, __m512i a, __m512i b) {
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}
#endif

enum { AHEAD = 4 };

typedef struct {
    const void *q, *keys, *values;
    void *out;
    const int32_t *lengths, *blocks;
    int64_t q_stride, table_width, kv, group, dim, block_tokens;
    float scale;
    int dtype;
} decode_job;

/* The cached tokens of one block: its first cache row and how many there are; the first rows of the next block and of the
 * one AHEAD, or -1. */
typedef struct {
    int64_t row, count, next, later;
} piece;

static inline piece piece_at(const decode_job *job, const int32_t *table, int64_t start, int64_t n) {
    const int64_t left = n - start, size = job->block_tokens, block = start / size;
    return (piece){table[block] * size, left < size ? left : size, left > size ? table[block + 1] * size : -1,
                   left > AHEAD * size ? table[block + AHEAD] * size : -1};
}

/* Blocks lie anywhere, so the hardware doesn't foresee them: the next one is fetched into the nearest cache, one further
 * on into the second. */
static inline void prefetch_rows(const void *base, int64_t row, int64_t stride, int64_t at, int64_t dim, int dtype,
                                 const int near) {
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
    if (row < 0) return;
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t byte = 0; byte < dim * size; byte += 64) {
            const char *line = (const char *)base + ((row + i) * stride + at) * size + byte;
            if (near) __builtin_prefetch(line, 0, 3);
            else __builtin_prefetch(line, 0, 2);
        }
}

static inline void prefetch(const void *base, const piece p, int64_t stride, int64_t at, int64_t dim, int dtype) {
    prefetch_rows(base, p.later, stride, at, dim, dtype, 0);
    prefetch_rows(base, p.next, stride, at, dim, dtype, 1);
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
        prefetch(job->keys, p, stride, head * dim, dim, dtype);
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
            prefetch(job->values, p, stride, lane, width * LANES, dtype);
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

#ifdef PAIRS
/* The same for bfloat16 by products of pairs: of two inputs of a query and a key, then of two keys' weights and values. A
 * weight is rounded to bfloat16 after the softmax. dim is a multiple of 32. */
static inline __attribute__((always_inline)) void attend_pairs(const decode_job *job, int64_t sequence, int64_t head,
                                                               float *scratch, const int64_t dim, const int64_t group) {
    const int64_t n = job->lengths[sequence], padded = (n + LANES - 1) / LANES * LANES, halves = dim / 32;
    const int32_t *table = job->blocks + sequence * job->table_width;
    const uint16_t *q = (const uint16_t *)job->q + sequence * job->q_stride + head * group * dim;
    const uint16_t *keys = (const uint16_t *)job->keys + head * dim, *values = (const uint16_t *)job->values + head * dim;
    const int64_t stride = job->kv * dim;
    float *scores = scratch;
    for (int64_t start = 0; start < n; start += job->block_tokens) {
        const piece p = piece_at(job, table, start, n);
        prefetch(keys, p, stride, 0, dim, BFLOAT16);
        vec products[group * LANES];
        for (int64_t i = 0; i < LANES; i++) {
            /* The last block's free rows are read too; their scores are never used. */
            const uint16_t *key = keys + (p.row + i) * stride;
            vec total[group];
            for (int64_t g = 0; g < group; g++) total[g] = splat(0);
            for (int64_t c = 0; c < halves; c++) {
                const __m512i k = _mm512_loadu_si512(key + c * 32);
                for (int64_t g = 0; g < group; g++)
                    total[g] = add_pairs_of(total[g], k, _mm512_loadu_si512(q + g * dim + c * 32));
            }
            for (int64_t g = 0; g < group; g++) products[g * LANES + i] = total[g];
        }
        for (int64_t g = 0; g < group; g++)
            store(scores, g * padded + start, sums(products + g * LANES) * splat(job->scale), FLOAT32);
    }
    float scale[group];
    uint16_t *weights = (uint16_t *)(scores + group * padded);
    for (int64_t g = 0; g < group; g++) {
        scale[g] = softmax(scores + g * padded, n);
        for (int64_t i = 0; i < padded; i += LANES)
            store(weights, g * padded + i, load_f32(scores + g * padded + i), BFLOAT16);
    }
    const int64_t to = (sequence * job->kv + head) * group * dim;
    const int64_t most = group >= 6 ? 1 : 6 / group, wide = most < halves ? most : halves;
    for (int64_t first = 0; first < halves; first += wide) {
        const int64_t width = halves - first < wide ? halves - first : wide;
        vec total[group * wide * 2];
        for (int64_t k = 0; k < group * wide * 2; k++) total[k] = splat(0);
        for (int64_t start = 0; start < n; start += job->block_tokens) {
            const piece p = piece_at(job, table, start, n);
            prefetch(values, p, stride, first * 32, width * 32, BFLOAT16);
            for (int64_t i = 0; i < p.count; i += 2) {
                const uint16_t *value = values + (p.row + i) * stride + first * 32;
                for (int64_t c = 0; c < width; c++) {
                    const __m512i a = _mm512_loadu_si512(value + c * 32);
                    /* What others left beyond the sequence may be NaN: it must not be read. */
                    const __m512i b = i + 1 < p.count ? _mm512_loadu_si512(value + stride + c * 32) : _mm512_setzero_si512();
                    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                    for (int64_t g = 0; g < group; g++) {
                        int32_t both;
                        memcpy(&both, weights + g * padded + start + i, 4);
                        vec *sum = total + (c * group + g) * 2;
                        sum[0] = add_pairs_of(sum[0], low, _mm512_set1_epi32(both));
                        sum[1] = add_pairs_of(sum[1], high, _mm512_set1_epi32(both));
                    }
                }
            }
        }
        /* unpacklo and unpackhi took four columns in turn from each 128 bits: back in their order */
        const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i right = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int64_t c = 0; c < width; c++)
            for (int64_t g = 0; g < group; g++) {
                const __m512 low = (__m512)total[(c * group + g) * 2], high = (__m512)total[(c * group + g) * 2 + 1];
                const int64_t at = to + g * dim + (first + c) * 32;
                store(job->out, at, (vec)_mm512_permutex2var_ps(low, left, high) * splat(scale[g]), BFLOAT16);
                store(job->out, at + 16, (vec)_mm512_permutex2var_ps(low, right, high) * splat(scale[g]), BFLOAT16);
            }
    }
}

/* Whether there was a kernel for this shape. */
static int attend_pairs_any(const decode_job *job, int64_t sequence, int64_t head, float *scratch) {
    if (job->dtype != BFLOAT16) return 0;
#define CASE(DIM, GROUP)                                                \
    if (job->dim == DIM && job->group == GROUP) {                       \
        attend_pairs(job, sequence, head, scratch, DIM, GROUP);         \
        return 1;                                                       \
    }
    CASE(64, 1)
    CASE(64, 2)
    CASE(64, 3)
    CASE(64, 4)
    CASE(64, 7)
    CASE(64, 8)
    CASE(128, 1)
    CASE(128, 2)
    CASE(128, 3)
    CASE(128, 4)
    CASE(128, 8)
#undef CASE
    return 0;
}
#endif

static void attend_any(const decode_job *job, int64_t sequence, int64_t head, float *scratch) {
#ifdef PAIRS
    if (attend_pairs_any(job, sequence, head, scratch)) return;
#endif
#define CASE(DTYPE, DIM, GROUP)                                             \
    if (job->dtype == DTYPE && job->dim == DIM && job->group == GROUP) {    \
        attend(job, sequence, head, scratch, DTYPE, DIM, GROUP);            \
        return;                                                             \
    }
    CASE(BFLOAT16, 64, 3)
    CASE(BFLOAT16, 64, 8)
    CASE(BFLOAT16, 128, 1)
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
    const size_t floats = group * dim + 2 * group * (longest + LANES);
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

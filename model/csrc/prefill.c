/*
 * Attention of several new tokens of one sequence over its paged cache. As in kernels.c, a row's result depends on
 * that row alone: neither what else is in the chunk nor the number of threads changes it. (Only a value that is not
 * finite also reaches the few rows before it that are computed together with it; that sequence fails anyway.)
 *
 * Keys and values are first laid out for the arithmetic: keys transposed, so that 16 of them are one vector, both in
 * float32. Then ROWS rows (a row is a head of a token) are taken at a time, so that what is loaded is used ROWS times.
 */
#include <stddef.h>
#include <stdlib.h>

#include "vectors.h"

enum { ROWS = 6, WIDE = 4 };

typedef struct {
    const void *q, *keys, *values;
    void *out;
    const int32_t *blocks;
    int64_t q_stride, out_stride, start, count, kv, group, dim, block_tokens;
    float scale;
    int dtype;
} prefill_job;

/* Block number `b` of key/value head `head`: keys to turned (blocks, dim, 16), values to flat (tokens, dim). */
static void lay_out(const prefill_job *job, int64_t head, int64_t b, float *turned, float *flat) {
    const int64_t dim = job->dim, length = job->start + job->count;
    const int64_t left = length - b * LANES, count = left < LANES ? left : LANES;
    float *keys = turned + b * dim * LANES, *values = flat + b * LANES * dim;
    for (int64_t i = 0; i < LANES; i++) {
        /* Rows beyond the sequence may hold anything, NaN too; as zeros they don't matter. */
        const int64_t row = (int64_t)job->blocks[b] * job->block_tokens + i, at = (row * job->kv + head) * dim;
        for (int64_t d = 0; d < dim; d++) {
            keys[d * LANES + i] = i < count ? get(job->keys, at + d, job->dtype) : 0.0f;
            values[i * dim + d] = i < count ? get(job->values, at + d, job->dtype) : 0.0f;
        }
    }
}

/* scores[r] (padded) = q[r] . each of the first `blocks` * 16 keys; `blocks` is even. */
static void score_rows(const float *q, const float *turned, int64_t blocks, int64_t dim, int64_t padded,
                       float *scores) {
    for (int64_t b = 0; b < blocks; b += 2) {
        const float *one = turned + b * dim * LANES, *two = one + dim * LANES;
        vec first[ROWS], second[ROWS];
        for (int r = 0; r < ROWS; r++) first[r] = second[r] = splat(0);
        for (int64_t d = 0; d < dim; d++) {
            const vec a = load_f32(one + d * LANES), c = load_f32(two + d * LANES);
            for (int r = 0; r < ROWS; r++) {
                const vec x = splat(q[r * dim + d]);
                first[r] += x * a;
                second[r] += x * c;
            }
        }
        for (int r = 0; r < ROWS; r++) {
            store(scores, r * padded + b * LANES, first[r], FLOAT32);
            store(scores, r * padded + (b + 1) * LANES, second[r], FLOAT32);
        }
    }
}

/* total[r * WIDE + c] = sum over `n` tokens of weights[r] * values, for `width` vectors of the head from `values` on. */
static inline __attribute__((always_inline)) void weigh_rows(const float *weights, const float *values, int64_t n,
                                                             int64_t dim, int64_t padded, const int width,
                                                             vec *total) {
    vec sums_[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < width; c++) sums_[r][c] = splat(0);
    for (int64_t j = 0; j < n; j++) {
        vec value[WIDE];
        for (int c = 0; c < width; c++) value[c] = load_f32(values + j * dim + c * LANES);
        for (int r = 0; r < ROWS; r++) {
            const vec weight = splat(weights[r * padded + j]);
            for (int c = 0; c < width; c++) sums_[r][c] += weight * value[c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < width; c++) total[r * WIDE + c] = sums_[r][c];
}

/* Rows first_row .. first_row + ROWS - 1 of key/value head `head`; what lies beyond the last row is computed twice. */
static void attend_rows(const prefill_job *job, int64_t head, int64_t first_row, const float *turned,
                        const float *flat, float *scratch) {
    const int64_t dim = job->dim, group = job->group, all = job->count * group;
    const int64_t last_row = first_row + ROWS < all ? first_row + ROWS - 1 : all - 1;
    const int64_t n = job->start + last_row / group + 1; /* what the last row sees */
    const int64_t blocks = (n + 2 * LANES - 1) / (2 * LANES) * 2, padded = blocks * LANES;
    float *q = scratch, *scores = scratch + ROWS * dim, scale[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t row = first_row + r < all ? first_row + r : last_row;
        const int64_t at = row / group * job->q_stride + (head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d++) q[r * dim + d] = get(job->q, at + d, job->dtype) * job->scale;
    }
    score_rows(q, turned, blocks, dim, padded, scores);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t row = first_row + r < all ? first_row + r : last_row, sees = job->start + row / group + 1;
        scale[r] = softmax(scores + r * padded, sees);
        for (int64_t i = (sees + LANES - 1) / LANES * LANES; i < padded; i++) scores[r * padded + i] = 0;
    }
    for (int64_t c = 0; c < dim; c += WIDE * LANES) {
        const int64_t width = dim - c < WIDE * LANES ? (dim - c) / LANES : WIDE;
        vec total[ROWS * WIDE];
        if (width == WIDE) weigh_rows(scores, flat + c, n, dim, padded, WIDE, total);
        else weigh_rows(scores, flat + c, n, dim, padded, (int)width, total);
        for (int64_t r = 0; first_row + r <= last_row; r++) {
            const int64_t row = first_row + r;
            const int64_t to = row / group * job->out_stride + (head * group + row % group) * dim + c;
            for (int64_t i = 0; i < width; i++)
                store(job->out, to + i * LANES, total[r * WIDE + i] * splat(scale[r]), job->dtype);
        }
    }
}

/* q and out (count, kv * group, dim) with rows q_stride and out_stride apart; token i of them is at position
 * start + i and sees positions 0 .. start + i. keys and values (rows, kv, dim), blocks the numbers of the sequence's
 * cache blocks. dim is a multiple of 16, block_tokens is 16. Returns 0, or 1 without memory. */
int paged_prefill(const void *q, int64_t q_stride, const void *keys, const void *values, void *out,
                  int64_t out_stride, const int32_t *blocks, int64_t start, int64_t count, int64_t kv, int64_t group,
                  int64_t dim, int64_t block_tokens, float scale, int dtype, int threads) {
    const prefill_job job = {q, keys, values, out, blocks, q_stride, out_stride, start, count, kv, group, dim,
                             block_tokens, scale, dtype};
    /* One block more than there is, of zeros: rows are scored two blocks at a time. */
    const int64_t used = (start + count + LANES - 1) / LANES, room = used + 1;
    const int64_t tiles = (count * group + ROWS - 1) / ROWS;
    float *turned = malloc((size_t)(2 * room * LANES * dim) * sizeof(float)), *flat = turned + room * LANES * dim;
    int failed = !turned;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && count * group * used > 200)
#endif
    {
        float *scratch = malloc((size_t)(ROWS * (dim + room * LANES)) * sizeof(float));
        if (!scratch) failed = 1;
        for (int64_t head = 0; head < kv; head++) {
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
            for (int64_t b = 0; b < room; b++) {
                if (failed) continue;
                if (b < used) lay_out(&job, head, b, turned, flat);
                else memset(turned + b * dim * LANES, 0, (size_t)(dim * LANES) * sizeof(float));
            }
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 2)
#endif
            for (int64_t tile = tiles - 1; tile >= 0; tile--)
                if (!failed) attend_rows(&job, head, tile * ROWS, turned, flat, scratch);
        }
        free(scratch);
    }
    free(turned);
    return failed;
}

/*
 * All layers of a step in one call: what Attention and FeedForward in llama.py do, for weights packed as in linear.c.
 * In between nothing waits for Python, whose calls would cost a small model a quarter of its step.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"

enum { FLOAT32 = 0, BFLOAT16 = 1, NO_MEMORY = -1 };

/* A packed weight: `bits` is 16, 8 or 4; scales and offsets as far as those have them. */
typedef struct {
    const void *codes;
    const uint16_t *scales, *offsets;
    int64_t inputs, outputs, bits;
} linear;

typedef struct {
    const float *attention_norm, *ffn_norm;
    linear wqkv, wo, w13, w2;
    void *keys, *values; /* this layer's cache, (rows, kv, head_dim) */
} layer;

/* One rank's layers. llama.py's terms; `group` heads share each of the `kv` key/value heads. */
typedef struct {
    const layer *layers;
    const float *rotary; /* (positions, head_dim / 2) pairs (cos, sin) */
    communicator *comm;  /* NULL for a single rank */
    int64_t n_layers, dim, kv, group, head_dim, hidden, block_tokens;
    float eps;
    int dtype; /* of activations and cache */
} stack;

/* A step: T tokens of S sequences, one after the other. */
typedef struct {
    const int64_t *positions, *slots; /* (T,) place in the sequence, cache row */
    const int32_t *counts, *lengths;  /* (S,) tokens of each sequence in this step; in its cache after it */
    const int32_t *blocks;            /* (S, table_width) numbers of cache blocks */
    int64_t tokens, sequences, table_width;
} step;

typedef struct {
    void *x, *qkv, *seen, *delta, *gate_up, *active;
} buffers;

static int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static int apply(const linear *l, const void *x, void *y, int64_t rows, int dtype, int threads) {
    if (l->bits == 16) {
        linear_bf16(x, l->codes, y, rows, l->inputs, l->outputs, dtype, threads);
        return 0;
    }
    return linear_int(x, l->codes, l->scales, l->offsets, y, rows, l->inputs, l->outputs, (int)l->bits, dtype, dtype,
                      threads)
               ? NO_MEMORY
               : 0;
}

/* Attention of all sequences: neighbors with one new token each are done together. */
static int attend(const stack *m, const layer *l, const step *s, const buffers *b, int threads) {
    const int64_t heads = m->kv * m->group, width = (heads + 2 * m->kv) * m->head_dim, size = size_of(m->dtype);
    const float scale = 1.0f / sqrtf((float)m->head_dim);
    int64_t token = 0;
    for (int64_t i = 0; i < s->sequences;) {
        const void *q = (const char *)b->qkv + token * width * size;
        void *out = (char *)b->seen + token * heads * m->head_dim * size;
        const int32_t *table = s->blocks + i * s->table_width;
        int64_t same = 0;
        while (i + same < s->sequences && s->counts[i + same] == 1) same++;
        int failed;
        if (same) {
            failed = paged_decode(q, width, l->keys, l->values, out, s->lengths + i, table, same, s->table_width, m->kv,
                                  m->group, m->head_dim, m->block_tokens, scale, m->dtype, threads);
            token += same;
            i += same;
        } else {
            failed = paged_prefill(q, width, l->keys, l->values, out, heads * m->head_dim, table,
                                   s->lengths[i] - s->counts[i], s->counts[i], m->kv, m->group, m->head_dim,
                                   m->block_tokens, scale, m->dtype, threads);
            token += s->counts[i];
            i++;
        }
        if (failed) return NO_MEMORY;
    }
    return 0;
}

static int reduce(const stack *m, void *delta, int64_t tokens) {
    return m->comm ? coll_all_reduce(m->comm, delta, tokens * m->dim, m->dtype) : 0;
}

/* One layer. `first`: there is no delta yet to add to h. Returns 0, NO_MEMORY or a failure of the communicator. */
static int run_layer(const stack *m, const layer *l, const step *s, float *h, const buffers *b, int first, int threads) {
    const int64_t rows = s->tokens, heads = m->kv * m->group;
    int failed;
    add_rms_norm(h, first ? NULL : b->delta, l->attention_norm, b->x, rows, m->dim, m->eps, m->dtype);
    if ((failed = apply(&l->wqkv, b->x, b->qkv, rows, m->dtype, threads))) return failed;
    rotate_and_store(b->qkv, m->rotary, s->positions, s->slots, l->keys, l->values, rows, heads, m->kv, m->head_dim,
                     m->dtype);
    if ((failed = attend(m, l, s, b, threads))) return failed;
    if ((failed = apply(&l->wo, b->seen, b->delta, rows, m->dtype, threads))) return failed;
    if ((failed = reduce(m, b->delta, rows))) return failed;
    add_rms_norm(h, b->delta, l->ffn_norm, b->x, rows, m->dim, m->eps, m->dtype);
    if ((failed = apply(&l->w13, b->x, b->gate_up, rows, m->dtype, threads))) return failed;
    silu_multiply(b->gate_up, b->active, rows, m->hidden, m->dtype);
    if ((failed = apply(&l->w2, b->active, b->delta, rows, m->dtype, threads))) return failed;
    return reduce(m, b->delta, rows);
}

/* h (T, dim) float32, the embedded tokens, runs through all layers; `delta` (T, dim) is left to be added to it.
 * Writes the tokens' keys and values to the cache. Returns 0, NO_MEMORY or a failure of the communicator. */
int run_layers(const stack *m, const step *s, float *h, void *delta, int threads) {
    const int64_t heads = m->kv * m->group * m->head_dim, widths[] = {m->dim, heads + 2 * m->kv * m->head_dim, heads,
                                                                     2 * m->hidden, m->hidden};
    int64_t total = 0;
    for (int i = 0; i < 5; i++) total += widths[i];
    char *memory = malloc((size_t)(s->tokens * total * size_of(m->dtype)));
    if (!memory) return NO_MEMORY;
    buffers b = {.delta = delta};
    void **each[] = {&b.x, &b.qkv, &b.seen, &b.gate_up, &b.active};
    char *at = memory;
    for (int i = 0; i < 5; i++) {
        *each[i] = at;
        at += s->tokens * widths[i] * size_of(m->dtype);
    }
    int failed = 0;
    for (int64_t i = 0; i < m->n_layers && !failed; i++) failed = run_layer(m, m->layers + i, s, h, &b, i == 0, threads);
    free(memory);
    return failed;
}

/*
 * What a transformer layer needs besides its matrix products and attention, for float32 and bfloat16 on a CPU: norm,
 * rotary embedding with the cache write, and the gated unit.
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

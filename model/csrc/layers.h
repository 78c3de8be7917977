/* What layers.c calls of the other files; their comments say what each does. */
#ifndef LAYERS_H
#define LAYERS_H

#include <stdint.h>

typedef struct communicator communicator;

int coll_all_reduce(communicator *c, void *data, int64_t elements, int dtype);

void add_rms_norm(float *h, const void *delta, const float *weight, void *out, int64_t rows, int64_t dim, float eps,
                  int dtype);
void rotate_and_store(void *qkv, const float *table, const int64_t *positions, const int64_t *slots, void *keys,
                      void *values, int64_t rows, int64_t heads, int64_t kv, int64_t dim, int dtype);
void silu_multiply(const void *gate_up, void *out, int64_t rows, int64_t hidden, int dtype);
int paged_decode(const void *q, int64_t q_stride, const void *keys, const void *values, void *out,
                 const int32_t *lengths, const int32_t *blocks, int64_t sequences, int64_t table_width, int64_t kv,
                 int64_t group, int64_t dim, int64_t block_tokens, float scale, int dtype, int threads);
int paged_prefill(const void *q, int64_t q_stride, const void *keys, const void *values, void *out,
                  int64_t out_stride, const int32_t *blocks, int64_t start, int64_t count, int64_t kv, int64_t group,
                  int64_t dim, int64_t block_tokens, float scale, int dtype, int threads);

void linear_bf16(const uint16_t *x, const uint16_t *packed, void *y, int64_t rows, int64_t inputs, int64_t outputs,
                 int dtype, int threads);
int linear_int(const void *x, const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets, void *y,
               int64_t rows, int64_t inputs, int64_t outputs, int bits, int x_dtype, int y_dtype, int threads);

#endif

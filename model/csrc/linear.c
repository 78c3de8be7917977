/*
 * y = x W^T for weights in bfloat16, 8 or 4 bits.
 *
 * Weights are packed once into tiles of outputs, in the order in which they are read. A 16-bit tile has 64 outputs and
 * holds pairs of inputs side by side; an 8- or 4-bit tile has 16 outputs and holds groups of 32 inputs, each with a
 * scale (and, for 4 bits, an offset) per output: w = scale * u + offset, u an unsigned integer; for 8 bits the offset
 * is -128 * scale and not stored. The inputs are then quantized too, 32 at a time, to signed 8 bits (quantize_rows).
 *
 * Each output of a row is summed up in one order, whatever the number of rows or threads: a row's result does not depend
 * on its neighbors.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

enum { WIDE = 64, GROUP = 32, QUADS = GROUP / 4 };

typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));

static inline int64_t tiles_of(int64_t outputs, int64_t width) { return (outputs + width - 1) / width; }

/* Whether linear_bf16 runs on instructions made for it, and there are no faster ones (AMX) that it doesn't use. */
int linear_bf16_is_fast(void) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    return 1;
#else
    return 0;
#endif
}

/* ---- bfloat16 ---- */

/* weight (outputs, inputs) to packed (tiles, pairs, 64, 2), zeros where there is no output. `inputs` is even. */
void pack_bf16(const uint16_t *weight, uint16_t *packed, int64_t outputs, int64_t inputs, int threads) {
    const int64_t pairs = inputs / 2, tiles = tiles_of(outputs, WIDE), step = 16; /* pairs in a cache line of a row */
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
    for (int64_t t = 0; t < tiles; t++) {
        uint32_t *tile = (uint32_t *)packed + t * pairs * WIDE;
        const int64_t rows = outputs - t * WIDE < WIDE ? outputs - t * WIDE : WIDE;
        if (rows < WIDE) memset(tile, 0, (size_t)(pairs * WIDE) * sizeof *tile);
        for (int64_t first = 0; first < pairs; first += step) {
            const int64_t count = pairs - first < step ? pairs - first : step;
            for (int64_t r = 0; r < rows; r++) {
                const uint16_t *from = weight + (t * WIDE + r) * inputs + 2 * first;
                uint32_t *to = tile + first * WIDE + r, line[16];
                memcpy(line, from, (size_t)count * sizeof *line);
                if (count == step)
                    for (int64_t p = 0; p < step; p++) to[p * WIDE] = line[p];
                else
                    for (int64_t p = 0; p < count; p++) to[p * WIDE] = line[p];
            }
        }
    }
}

/* The rows `ids` of the weight that was packed, (count, inputs). */
void unpack_rows_bf16(const uint16_t *packed, const int64_t *ids, uint16_t *out, int64_t count, int64_t inputs) {
    const int64_t pairs = inputs / 2;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t *from = packed + ids[i] / WIDE * pairs * WIDE * 2 + ids[i] % WIDE * 2;
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = from[k / 2 * WIDE * 2 + k % 2];
    }
}

/* total += a0 b0 + a1 b1 in each lane, for a pair of inputs `x` and the pairs of 16 outputs at w. */
static inline vec add_pair(vec total, const uint16_t *w, uint32_t x) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32((int)x));
#else
    const uvec pair = *(const uvec *)w;
    const vec low = (vec)(pair << 16), high = (vec)(pair & 0xffff0000u);
    return total + low * splat(from_bfloat16((uint16_t)x)) + high * splat(from_bfloat16((uint16_t)(x >> 16)));
#endif
}

/* The first of y's columns from n on, as many of `lanes` as there are. */
static inline void store_lanes(void *y, int64_t row, int64_t n, int64_t outputs, vec lanes, int dtype) {
    const int64_t left = outputs - n;
    if (left >= LANES) {
        store(y, row * outputs + n, lanes, dtype);
        return;
    }
    float rest[LANES];
    memcpy(rest, &lanes, sizeof rest);
    for (int64_t i = 0; i < left; i++) put(y, row * outputs + n + i, rest[i], dtype);
}

/* `rows` rows of x times one tile. */
static inline __attribute__((always_inline)) void tile_bf16(const uint16_t *x, const uint16_t *tile, void *y,
                                                            const int64_t rows, int64_t inputs, int64_t outputs,
                                                            int64_t first, int dtype) {
    vec total[rows * 4];
#pragma GCC unroll 24
    for (int64_t i = 0; i < rows * 4; i++) total[i] = splat(0);
    for (int64_t p = 0; p < inputs / 2; p++) {
        const uint16_t *w = tile + p * WIDE * 2;
#pragma GCC unroll 6
        for (int64_t r = 0; r < rows; r++) {
            uint32_t both;
            memcpy(&both, x + r * inputs + 2 * p, 4);
#pragma GCC unroll 4
            for (int64_t j = 0; j < 4; j++) total[r * 4 + j] = add_pair(total[r * 4 + j], w + j * 32, both);
        }
    }
#pragma GCC unroll 6
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++) store_lanes(y, r, first + j * LANES, outputs, total[r * 4 + j], dtype);
}

static void rows_bf16(const uint16_t *x, const uint16_t *tile, void *y, int64_t rows, int64_t inputs, int64_t outputs,
                      int64_t first, int dtype) {
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
#define ROWS(N) case N: tile_bf16(x, tile, y, N, inputs, outputs, first, dtype); return;
    for (; rows > 6; rows -= 6, x += 6 * inputs, y = (char *)y + 6 * outputs * size)
        tile_bf16(x, tile, y, 6, inputs, outputs, first, dtype);
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
}

/* x (rows, inputs) bfloat16 -> y (rows, outputs) in `dtype`. */
void linear_bf16(const uint16_t *x, const uint16_t *packed, void *y, int64_t rows, int64_t inputs, int64_t outputs,
                 int dtype, int threads) {
    const int64_t pairs = inputs / 2, tiles = tiles_of(outputs, WIDE);
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
    for (int64_t t = 0; t < tiles; t++)
        rows_bf16(x, packed + t * pairs * WIDE * 2, y, rows, inputs, outputs, t * WIDE, dtype);
}

/* ---- 8 and 4 bits ---- */

/* A packed weight: codes by tile and group (512 bytes, or 256 for 4 bits), scales and offsets by tile and group (16). */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *offsets; /* float16 */
} packed_weight;

/* Inputs in 8 bits: for each row all its numbers, then for each group a scale, then the sum of the group's numbers. */
typedef struct {
    const int8_t *numbers;
    const float *scales, *sums;
} quantized_row;

static inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

/* Bytes of a row as quantize_rows leaves it. */
static inline int64_t row_bytes(int64_t groups) { return groups * (GROUP + 2 * (int64_t)sizeof(float)); }

static inline quantized_row row_at(const void *base, int64_t row, int64_t groups) {
    const char *at = (const char *)base + row * row_bytes(groups);
    const float *scales = (const float *)(at + groups * GROUP);
    return (quantized_row){(const int8_t *)at, scales, scales + groups};
}

static inline vec load_f16(const uint16_t *p) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = from_float16(p[i]);
    return load_f32(wide);
#endif
}

/* total += u0 x0 + u1 x1 + u2 x2 + u3 x3 in each lane: four unsigned codes of an output times four signed inputs. */
static inline ivec add_quad(ivec total, ivec codes, const int8_t *x) {
#ifdef __AVX512VNNI__
    int32_t four;
    memcpy(&four, x, 4);
    return (ivec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(four));
#else
    const uvec u = (uvec)codes;
    total += (ivec)(u & 0xff) * x[0] + (ivec)(u >> 8 & 0xff) * x[1];
    return total + (ivec)(u >> 16 & 0xff) * x[2] + (ivec)(u >> 24) * x[3];
#endif
}

static float largest(vec x) {
    float values[LANES], top = 0;
    memcpy(values, &x, sizeof values);
    for (int i = 0; i < LANES; i++) top = values[i] > top ? values[i] : top;
    return top;
}

static inline vec absolute(vec x) { return (vec)((uvec)x & 0x7fffffffu); }

/* x (rows, inputs) to `out`, groups that end beyond the inputs filled up with zeros. A group that isn't finite gets a
 * scale of NaN, so that it is seen in the result. */
static void quantize_rows(const void *x, void *out, int64_t rows, int64_t inputs, int dtype) {
    const int64_t groups = groups_of(inputs);
    for (int64_t r = 0; r < rows; r++) {
        const quantized_row row = row_at(out, r, groups);
        for (int64_t g = 0; g < groups; g++) {
            float padded[GROUP];
            vec low, high;
            const int64_t left = inputs - g * GROUP;
            if (left >= GROUP) {
                low = load(x, r * inputs + g * GROUP, dtype);
                high = load(x, r * inputs + g * GROUP + LANES, dtype);
            } else {
                for (int64_t i = 0; i < GROUP; i++)
                    padded[i] = i < left ? get(x, r * inputs + g * GROUP + i, dtype) : 0.0f;
                low = load_f32(padded);
                high = load_f32(padded + LANES);
            }
            const vec a = absolute(low), b = absolute(high);
            const uvec more = (uvec)(a > b);
            const float spread = sum(a + b), top = largest((vec)((more & (uvec)a) | (~more & (uvec)b)));
            const float inverse = top > 0 ? 127.0f / top : 0.0f;
            const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
            const vec first = (low * splat(inverse) + shift) - shift, second = (high * splat(inverse) + shift) - shift;
            typedef int8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
            int8_t *to = (int8_t *)row.numbers + g * GROUP;
            const int finite = spread - spread == 0;
            *(bytes *)to = __builtin_convertvector(finite ? first : splat(0), bytes);
            *(bytes *)(to + LANES) = __builtin_convertvector(finite ? second : splat(0), bytes);
            ((float *)row.scales)[g] = finite ? top / 127.0f : NAN;
            ((float *)row.sums)[g] = finite ? sum(first + second) : 0.0f;
        }
    }
}

/* `rows` rows times one tile of 16 outputs. */
static inline __attribute__((always_inline)) void tile_int(const void *x, int64_t row, const packed_weight w, void *y,
                                                           const int bits, const int64_t rows, int64_t groups,
                                                           int64_t outputs, int64_t first, int dtype) {
    vec total[rows];
    quantized_row from[rows];
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; r++) {
        total[r] = splat(0);
        from[r] = row_at(x, row + r, groups);
    }
    for (int64_t g = 0; g < groups; g++) {
        ivec codes[QUADS];
        const ivec *packed = (const ivec *)(w.codes + g * QUADS * 64 * bits / 8);
#pragma GCC unroll 8
        for (int64_t i = 0; i < QUADS; i++)
            codes[i] = bits == 8 ? packed[i] : (ivec)((uvec)packed[i / 2] >> (i % 2 * 4) & 0x0f0f0f0fu);
        const vec scale = load_f16(w.scales + g * LANES);
        vec offset;
        if (bits == 8) offset = splat(-128) * scale;
        else offset = load_f16(w.offsets + g * LANES);
#pragma GCC unroll 8
        for (int64_t r = 0; r < rows; r++) {
            const int8_t *numbers = from[r].numbers + g * GROUP;
            ivec even = (ivec){0}, odd = even;
#pragma GCC unroll 4
            for (int64_t i = 0; i < QUADS; i += 2) {
                even = add_quad(even, codes[i], numbers + 4 * i);
                odd = add_quad(odd, codes[i + 1], numbers + 4 * i + 4);
            }
            const vec product = __builtin_convertvector(even + odd, vec) * scale + splat(from[r].sums[g]) * offset;
            total[r] += product * splat(from[r].scales[g]);
        }
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; r++) store_lanes(y, row + r, first, outputs, total[r], dtype);
}

static void rows_int(const void *x, const packed_weight w, void *y, int bits, int64_t rows, int64_t groups,
                     int64_t outputs, int64_t first, int dtype) {
    int64_t row = 0;
#define ROWS(BITS, N) case N: tile_int(x, row, w, y, BITS, N, groups, outputs, first, dtype); return;
#define ALL(BITS)                                                                                        \
    for (; rows - row > 8; row += 8) tile_int(x, row, w, y, BITS, 8, groups, outputs, first, dtype);     \
    switch (rows - row) { ROWS(BITS, 1) ROWS(BITS, 2) ROWS(BITS, 3) ROWS(BITS, 4) ROWS(BITS, 5)          \
                          ROWS(BITS, 6) ROWS(BITS, 7) ROWS(BITS, 8) }
    if (bits == 8) { ALL(8) }
    else { ALL(4) }
#undef ALL
#undef ROWS
}

/* x (rows, inputs) in `x_dtype` -> y (rows, outputs) in `y_dtype`. `bits` is 8 or 4; offsets only for 4.
 * Returns 0, or 1 without memory. */
int linear_int(const void *x, const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets, void *y,
               int64_t rows, int64_t inputs, int64_t outputs, int bits, int x_dtype, int y_dtype, int threads) {
    const int64_t groups = groups_of(inputs), tiles = tiles_of(outputs, LANES);
    void *quantized = malloc((size_t)(rows * row_bytes(groups)));
    if (!quantized) return 1;
    quantize_rows(x, quantized, rows, inputs, x_dtype);
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t at = t * groups * LANES;
        const packed_weight w = {codes + at * GROUP * bits / 8, scales + at, bits == 8 ? NULL : offsets + at};
        rows_int(quantized, w, y, bits, rows, groups, outputs, t * LANES, y_dtype);
    }
    free(quantized);
    return 0;
}

/* 32 numbers, as two vectors. */
typedef struct {
    vec low, high;
} numbers;

static inline vec at_least(vec x, vec least) {
    const uvec less = (uvec)(x < least);
    return (vec)((less & (uvec)least) | (~less & (uvec)x));
}

static inline vec at_most(vec x, vec most) { return -at_least(-x, -most); }

/* The nearest whole numbers within 0..most. */
static inline vec rounded_codes(vec x, float most) {
    const vec shift = splat(12582912.0f);
    return at_most(at_least((x + shift) - shift, splat(0)), splat(most));
}

static inline vec squared_error(vec x, float scale, float offset, float inverse) {
    const vec wrong = rounded_codes((x - splat(offset)) * splat(inverse), 15) * splat(scale) + splat(offset) - x;
    return wrong * wrong;
}

/* Scale and offset of a group in 4 bits, rounded to float16: of several, those with the least squared error. They start at
 * the least number or a little above it. They end at the largest or a little below; or the largest is `steps` above the
 * least, fewer than 15 of them, as in a group that was in 4 bits before and doesn't use all of them. */
static void choose_range(const numbers x, uint16_t *scale, uint16_t *offset) {
    float lows[LANES], highs[LANES], best = INFINITY;
    const vec least = at_most(x.low, x.high), most = at_least(x.low, x.high);
    memcpy(lows, &least, sizeof lows);
    memcpy(highs, &most, sizeof highs);
    float low = lows[0], high = highs[0];
    for (int i = 1; i < LANES; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    for (int way = 0; way < 22; way++) {
        const float step = (high - low) * 0.03f, from = way < 16 ? low + step * (float)(way % 4) : low;
        const float to = way < 16 ? high - step * (float)(way / 4) : high, steps = way < 16 ? 15 : (float)(30 - way);
        const uint16_t s = to_float16((to - from) / steps), o = to_float16(from);
        const float exact = from_float16(s), start = from_float16(o), inverse = exact > 0 ? 1 / exact : 0;
        const float error = sum(squared_error(x.low, exact, start, inverse) + squared_error(x.high, exact, start, inverse));
        if (!(error < best)) continue;
        best = error;
        *scale = s;
        *offset = o;
        if (error == 0) return;
    }
}

/* One group of one output: its codes to 8 or 4 bytes every 64, its scale and offset. */
static void pack_group(const numbers x, uint8_t *codes, uint16_t *scale, uint16_t *offset, int bits) {
    const vec a = absolute(x.low), b = absolute(x.high);
    const float top = largest(at_least(a, b)), spread = sum(a + b);
    float code[GROUP];
    if (!(spread - spread == 0)) {
        *scale = 0x7e00; /* NaN */
        if (bits == 4) *offset = 0;
        memset(code, 0, sizeof code);
    } else if (bits == 8) {
        *scale = to_float16(top / 127);
        const float exact = from_float16(*scale), inverse = exact > 0 ? 1 / exact : 0;
        store(code, 0, rounded_codes(x.low * splat(inverse) + splat(128), 255), FLOAT32);
        store(code, LANES, rounded_codes(x.high * splat(inverse) + splat(128), 255), FLOAT32);
    } else {
        choose_range(x, scale, offset);
        const float exact = from_float16(*scale), inverse = exact > 0 ? 1 / exact : 0;
        const vec start = splat(from_float16(*offset));
        store(code, 0, rounded_codes((x.low - start) * splat(inverse), 15), FLOAT32);
        store(code, LANES, rounded_codes((x.high - start) * splat(inverse), 15), FLOAT32);
    }
    for (int i = 0; i < GROUP; i++) {
        uint8_t *byte = codes + (bits == 8 ? i / 4 : i / 8) * 64 + i % 4;
        if (bits == 8) *byte = (uint8_t)code[i];
        else *byte |= (uint8_t)((uint8_t)code[i] << (i / 4 % 2 * 4));
    }
}

/* weight (outputs, inputs) in `dtype` to codes, scales and, for 4 bits, offsets, as linear_int reads them.
 * A group that isn't finite gets a scale that isn't. */
void pack_int(const void *weight, uint8_t *codes, uint16_t *scales, uint16_t *offsets, int64_t outputs, int64_t inputs,
              int bits, int dtype, int threads) {
    const int64_t groups = groups_of(inputs), tiles = tiles_of(outputs, LANES), size = QUADS * 64 * bits / 8;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
    for (int64_t tile = 0; tile < tiles; tile++) {
        memset(codes + tile * groups * size, 0, (size_t)(groups * size));
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t n = tile * LANES + lane, item = tile * groups + g, at = item * LANES + lane;
                const int64_t from = n * inputs + g * GROUP, left = n < outputs ? inputs - g * GROUP : 0;
                float padded[GROUP];
                numbers x;
                if (left >= GROUP) x = (numbers){load(weight, from, dtype), load(weight, from + LANES, dtype)};
                else {
                    for (int64_t i = 0; i < GROUP; i++) padded[i] = i < left ? get(weight, from + i, dtype) : 0.0f;
                    x = (numbers){load_f32(padded), load_f32(padded + LANES)};
                }
                pack_group(x, codes + item * size + lane * 4, scales + at, offsets ? offsets + at : NULL, bits);
            }
    }
}

/* The rows `ids` of a packed weight as float32 (count, inputs). */
void unpack_rows_int(const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets, const int64_t *ids, float *out,
                     int64_t count, int64_t inputs, int bits) {
    const int64_t groups = groups_of(inputs), size = QUADS * 64 * bits / 8;
    for (int64_t row = 0; row < count; row++) {
        const int64_t tile = ids[row] / LANES, lane = ids[row] % LANES;
        for (int64_t k = 0; k < inputs; k++) {
            const int64_t item = tile * groups + k / GROUP, at = item * LANES + lane, i = k % GROUP;
            const uint8_t byte = codes[item * size + (bits == 8 ? i / 4 : i / 8) * 64 + lane * 4 + i % 4];
            const float scale = from_float16(scales[at]);
            const int code = bits == 8 ? byte : byte >> (i / 4 % 2 * 4) & 15;
            out[row * inputs + k] = bits == 8 ? (float)(code - 128) * scale : (float)code * scale + from_float16(offsets[at]);
        }
    }
}

/*
 * Vectors of 16 floats, by the compilers' vector extension, which every target lowers to what it has; and what the
 * kernels do with them. Numbers lie in memory as float32 or bfloat16, all arithmetic is float32.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

/* Vectors are passed between functions of this file only, so it doesn't matter that their ABI depends on the CPU. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

enum { LANES = 16, FLOAT32 = 0, BFLOAT16 = 1 };
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32), aligned(2), may_alias));

static inline vec splat(float x) { return (vec){0} + x; }

static inline vec load_f32(const float *p) { return *(const vec *)p; }

static inline vec load_bf16(const uint16_t *p) {
    uvec wide = __builtin_convertvector(*(const hvec *)p, uvec) << 16;
    return (vec)wide;
}

static inline vec load(const void *p, int64_t i, int dtype) {
    return dtype == FLOAT32 ? load_f32((const float *)p + i) : load_bf16((const uint16_t *)p + i);
}

/* Rounds to nearest even, as to_bfloat16 does; NaN stays NaN. */
static inline void store(void *p, int64_t i, vec x, int dtype) {
    if (dtype == FLOAT32) {
        *(vec *)((float *)p + i) = x;
        return;
    }
    uvec u = (uvec)x;
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec nan = (uvec)((u & 0x7fffffff) > 0x7f800000);
    *(hvec *)((uint16_t *)p + i) = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), hvec);
}

static inline float get(const void *p, int64_t i, int dtype) {
    return dtype == FLOAT32 ? ((const float *)p)[i] : from_bfloat16(((const uint16_t *)p)[i]);
}

static inline void put(void *p, int64_t i, float x, int dtype) {
    if (dtype == FLOAT32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = to_bfloat16(x);
}

/* NO_SHUFFLES lets a test compile what older compilers get. */
#if defined(__has_builtin) && !defined(NO_SHUFFLES)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif

static inline float sum(vec x) {
    float total[LANES];
    memcpy(total, &x, sizeof total);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) total[i] += total[i + step];
    return total[0];
}

#ifdef SHUFFLES
/* Neighbors added up: the sums of a's pairs and of b's pairs, in some fixed order of lanes. */
static inline vec add_pairs(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

static inline vec add_fours(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

static inline vec add_eights(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}

static inline vec add_halves(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#endif

/* Lane i of the result is the sum of x[i]'s lanes: a transposition that adds on the way. */
static inline vec sums(const vec *x) {
#ifdef SHUFFLES
    vec two[8], four[4];
    for (int i = 0; i < 8; i++) two[i] = add_pairs(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++) four[i] = add_fours(two[2 * i], two[2 * i + 1]);
    return add_halves(add_eights(four[0], four[1]), add_eights(four[2], four[3]));
#else
    float total[LANES];
    for (int i = 0; i < LANES; i++) total[i] = sum(x[i]);
    return load_f32(total);
#endif
}

/* e^x for x <= 0, to about 2 units in the last place; below -87 it is 0, NaN stays NaN.
 * x = n ln 2 + r, e^x = 2^n e^r, with a polynomial for e^r (Taylor, degree 6; |r| <= ln 2 / 2). */
static inline vec exponential(vec x) {
    const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * splat(1.44269504f) + shift) - shift;
    vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec y = splat(1.0f / 720);
    y = y * r + splat(1.0f / 120);
    y = y * r + splat(1.0f / 24);
    y = y * r + splat(1.0f / 6);
    y = y * r + splat(0.5f);
    y = y * r + splat(1.0f);
    y = y * r + splat(1.0f);
    typedef int32_t ivec __attribute__((vector_size(64)));
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec result = y * (vec)power;
    uvec tiny = (uvec)(x < splat(-87.0f)), nan = (uvec)(x != x);
    return (vec)((((uvec)result & ~tiny) & ~nan) | (nan & (uvec)x));
}

/* scores[0..n) becomes e^(score - largest), what is left of the last vector 0. Returns 1 / the sum. */
static inline float softmax(float *scores, int64_t n) {
    const int64_t whole = n / LANES * LANES, padded = (n + LANES - 1) / LANES * LANES;
    for (int64_t i = n; i < padded; i++) scores[i] = -INFINITY;
    vec tops = load_f32(scores);
    for (int64_t i = LANES; i < padded; i += LANES) {
        const vec x = load_f32(scores + i);
        const uvec more = (uvec)(x > tops);
        tops = (vec)((more & (uvec)x) | (~more & (uvec)tops));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    vec total = splat(0);
    for (int64_t i = 0; i < padded; i += LANES) {
        const vec e = exponential(load_f32(scores + i) - splat(top));
        store(scores, i, e, FLOAT32);
        if (i < whole) total += e;
    }
    float rest = sum(total);
    for (int64_t i = whole; i < n; i++) rest += scores[i];
    return 1.0f / rest;
}

#endif

/*
 * 16-bit floats to and from float32 by bit operations: the same on every CPU, rounded to nearest even as torch does,
 * and plain enough for the compiler to vectorize.
 */
#ifndef HALF_H
#define HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline float from_float32(float x) { return x; }
static inline float to_float32(float x) { return x; }

static inline float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_bfloat16(float x) {
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Below 2^-14 a half counts in steps of 2^-24: adding a number whose last bit is worth as much does the shift. */
static inline float from_float16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    uint32_t normal = rest + (112u << 23), special = rest | 0x7f800000;
    uint32_t small = bits_of(float_of(rest + (113u << 23)) - float_of(113u << 23));
    uint32_t u = rest >= 0x0f800000 ? special : rest < 0x00800000 ? small : normal;
    return float_of(sign | u);
}

static inline uint16_t to_float16(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    uint32_t normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t h = rest > 0x7f800000 ? 0x7e00 : rest >= 0x477ff000 ? 0x7c00 : rest < 0x38800000 ? small : normal;
    return (uint16_t)(sign | h);
}

#endif

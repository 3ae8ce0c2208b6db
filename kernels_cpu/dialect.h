/* The words that differ between targets, as C11 on one x86-64 thread. kernels_cuda/ and kernels_hip/ have a
 * file of this name with the same words; the include path chooses.
 *
 * An op body is written for a block of lanes. Here the block is one thread: a loop over lanes is a plain
 * loop, every thread is lane 0, and a barrier between lanes is nothing. */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

#include <stddef.h>
#include <stdint.h>

#define K3_FN static inline
#define K3_INLINE static inline __attribute__((always_inline))
#define K3_LEAF static __attribute__((unused, noinline)) /* large, called with tiles: one copy per object file */
#define K3_RESTRICT __restrict__
#define K3_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#ifdef K3_LEAVES_AVX512_BF16
#define K3_X16_LEAVES 1 /* tiles_x16.h */
#endif
#if defined(K3_LEAVES_AVX2) || defined(K3_LEAVES_AVX512) || defined(K3_LEAVES_AVX512_BF16)
#define K3_TOKENS_LEAF 1 /* tiles_mxfp4.h */
#define K3_DELTA_LEAF 1  /* tiles_delta.h */
#endif
#if defined(K3_LEAVES_AVX512) || defined(K3_LEAVES_AVX512_BF16)
#define K3_SOON_LEAF 1 /* panel.h */
#endif

/* The lanes of the block share the iterations of [lo, hi). Iterations must not depend on each other, and what
 * one writes is not visible to the others before K3_SYNC. Never put a leaf call inside: a GPU leaf needs all
 * lanes. */
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo); i < (hi); i++)
#define K3_LANE0 1
#define K3_EXPERTS_COME 1 /* experts may be read while a step runs: moe_union.h */
#define K3_KEEPS_X 1 /* a worker runs several slices of an instruction, and what it made of x serves them all: panel_rows.h */
#define K3_ONE_LANE 1 /* what lanes share elsewhere, one does alone: where that changes the way to go */
#define K3_SYNC(c) ((void)(c))

K3_FN float k3_bits_to_f32(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

K3_FN uint32_t k3_f32_to_bits(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}

/* Explicit only: the compiler is told never to contract a * b + c. */
K3_FN float k3_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

/* Correctly rounded. */
K3_FN float k3_sqrt(float a) { return __builtin_sqrtf(a); }

#endif

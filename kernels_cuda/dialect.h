/* The words that differ between targets, as CUDA C++ for a block of 256 lanes (8 warps of 32). The same words
 * are in kernels_cpu/dialect.h and kernels_hip/dialect.h; the include path chooses.
 *
 * Compiled by nvcc and by NVRTC. NVRTC has no system headers, so the integer types are spelled here; the
 * source is expanded into one text and its system includes are dropped (k3tool/runtime/gpu_source.py).
 * Numerics: needs -fmad=false -ftz=true -prec-div=true -prec-sqrt=true (rule 1). Operators / + * then are the
 * correctly rounded, flushing ones, and only k3_fma contracts. */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t; /* as glibc spells them: nvcc's own headers define these names too */
typedef signed int int32_t;
typedef signed long int64_t;

#define K3_FN static __device__ __forceinline__
#define K3_INLINE static __device__ __forceinline__
#define K3_MEMBER __device__ __forceinline__
#define K3_LEAF static __device__
/* One copy of each: inlined into every body the code grows tenfold and ptxas spills. */
#define K3_TILE_LEAF static __device__ __noinline__
#define K3_SMALL_LEAF static __device__ __noinline__
#define K3_UNROLL _Pragma("unroll")
#define K3_RESTRICT __restrict__
#define K3_STATIC_ASSERT(condition, text) static_assert(condition, text)

#define K3_BLOCK_LANES 256u
#define K3_LANE ((uint32_t)threadIdx.x)

/* The lanes of the block share the iterations of [lo, hi); see kernels_cpu/dialect.h for what a body may do. */
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo) + K3_LANE; i < (hi); i += K3_BLOCK_LANES)
#define K3_LANE0 (K3_LANE == 0u)
#define K3_SYNC(c) ((void)(c), __syncthreads())

K3_FN float k3_bits_to_f32(uint32_t u) { return __uint_as_float(u); }
K3_FN uint32_t k3_f32_to_bits(float f) { return __float_as_uint(f); }

#ifdef K3_OPAQUE_FMA /* the contraction check: with every explicit fma hidden, the text may hold none */
extern "C" __device__ float k3_opaque_fma(float a, float b, float c);
K3_FN float k3_fma(float a, float b, float c) { return k3_opaque_fma(a, b, c); }
#else
K3_FN float k3_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#endif
K3_FN float k3_sqrt(float a) { return __fsqrt_rn(a); }

/* ---- for kernels_common/simt_leaves.h ------------------------------------------------------------- */

/* The value of the lane M away in this team of 16. Only the team takes part: its half warp is the mask, because
 * the other half may have fewer rows and be gone. */
template <int M>
K3_FN float k3_team_partner(float v) {
    return __shfl_xor_sync(0xffffu << (K3_LANE & 16u), v, M);
}

/* Four words from 16-byte aligned memory. Plain loads: activations are written while the kernel runs, so
 * never through the read-only path. */
K3_FN void k3_load4(const void *p, uint32_t w[4]) {
    const uint4 v = *(const uint4 *)p;
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

/* The same for weights, which are read once a step: do not keep them in the cache. */
K3_FN void k3_stream4(const void *p, uint32_t w[4]) {
    const uint4 v = __ldcs((const uint4 *)p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
K3_FN uint32_t k3_stream1(const void *p) { return __ldcs((const unsigned int *)p); }

#endif

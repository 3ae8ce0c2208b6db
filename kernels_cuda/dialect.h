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
/* An object of the block's shared memory, inside a function. */
#define K3_SHARED(type, name) __shared__ type name
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

/* ---- for kernels_common/simt_interp.h ------------------------------------------------------------- */

#define K3_BLOCK ((uint32_t)blockIdx.x)
#define K3_DEVICE_SCOPE 0u
#define K3_SYSTEM_SCOPE 1u /* other ranks' devices and the host */

/* A barrier orders the block's stores before the release that one lane issues behind it: releases are cumulative. */
#define K3_RETIRE(b) K3_SYNC(b)

#define K3_POLLS_ACQUIRE 1 /* the barrier behind them hands on what they saw */
K3_FN uint32_t k3_poll(const uint32_t *p, uint32_t scope) {
    uint32_t v;
    if (scope == K3_SYSTEM_SCOPE) asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
K3_FN void k3_acquire(uint32_t scope) { (void)scope; }
K3_FN void k3_pause(void) {}

/* A look orders nothing. */
K3_FN uint32_t k3_look(const uint32_t *p, uint32_t scope) {
    uint32_t v;
    if (scope == K3_SYSTEM_SCOPE) asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

K3_FN void k3_add_release(uint32_t *p, uint32_t n) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(p), "r"(n) : "memory");
}

/* Before one or more k3_add_system: what they then announce is visible to other devices. */
K3_FN void k3_release_system(void) { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
K3_FN void k3_add_system(uint32_t *p, uint32_t n) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" : : "l"(p), "r"(n) : "memory");
}

/* The cursor's value before; a cursor orders nothing. */
K3_FN uint32_t k3_take(uint32_t *cursor) {
    uint32_t v;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(cursor) : "memory");
    return v;
}

/* Both directions: who counts last sees what all others did. */
K3_FN uint32_t k3_count_out(uint32_t *p) {
    uint32_t v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Whether *p was 0 and now is v. */
K3_FN int k3_swap_zero(uint32_t *p, uint32_t v, uint32_t scope) {
    uint32_t was;
    if (scope == K3_SYSTEM_SCOPE)
        asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], 0, %2;" : "=r"(was) : "l"(p), "r"(v) : "memory");
    else
        asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, %2;" : "=r"(was) : "l"(p), "r"(v) : "memory");
    return was == 0u;
}

K3_FN void k3_add64(uint64_t *p, uint64_t v) { atomicAdd((unsigned long long *)p, (unsigned long long)v); }
K3_FN void k3_block_add(uint64_t *shared, uint64_t v) { k3_add64(shared, v); }

/* Nanoseconds; the launch's deadline is in the same unit. */
K3_FN uint64_t k3_clock(void) {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

#endif

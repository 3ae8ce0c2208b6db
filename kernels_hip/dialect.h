/* The words that differ between targets, as HIP C++ for a block of 512 lanes (8 waves of 64). The same words
 * are in kernels_cpu/dialect.h and kernels_cuda/dialect.h; the include path chooses.
 *
 * Compiled by clang with -nogpuinc -nogpulib and by hipRTC: only compiler builtins, no header and no device
 * library, so that what is compiled without ROCm is what runs with it.
 * Numerics: needs -ffp-contract=off -fgpu-flush-denormals-to-zero -fhip-fp32-correctly-rounded-divide-sqrt
 * (rule 1). */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;

#ifndef __device__ /* the HIP headers' own spelling, where they are absent */
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(lanes) __attribute__((amdgpu_flat_work_group_size(lanes, lanes)))
#endif

#define K3_FN static __device__ inline __attribute__((always_inline))
#define K3_INLINE static __device__ inline __attribute__((always_inline))
#define K3_MEMBER __device__ inline __attribute__((always_inline))
#define K3_LEAF static __device__ __attribute__((unused))
/* A callee saves the registers from v40 on in scratch memory, some 90 KB a block: the tiles are inlined. What needs
 * fewer is not, or the code would not fit an instruction cache. */
#define K3_TILE_LEAF static __device__ __attribute__((always_inline))
#define K3_SMALL_LEAF static __device__ __attribute__((noinline))
#define K3_UNROLL _Pragma("unroll")
#define K3_RESTRICT __restrict__
#define K3_STATIC_ASSERT(condition, text) static_assert(condition, text)

#define K3_BLOCK_LANES 512u
#define K3_LANE ((uint32_t)__builtin_amdgcn_workitem_id_x())

/* The lanes of the block share the iterations of [lo, hi); see kernels_cpu/dialect.h for what a body may do. */
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo) + K3_LANE; i < (hi); i += K3_BLOCK_LANES)
#define K3_LANE0 (K3_LANE == 0u)
#define K3_SYNC(c) ((void)(c), k3_block_sync())

/* A barrier that also orders memory inside the workgroup: s_barrier alone does not wait for stores. */
K3_FN void k3_block_sync(void) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

K3_FN float k3_bits_to_f32(uint32_t u) { return __builtin_bit_cast(float, u); }
K3_FN uint32_t k3_f32_to_bits(float f) { return __builtin_bit_cast(uint32_t, f); }

#ifdef K3_OPAQUE_FMA /* the contraction check: with every explicit fma hidden, the text may hold none */
extern "C" __device__ float k3_opaque_fma(float a, float b, float c);
K3_FN float k3_fma(float a, float b, float c) { return k3_opaque_fma(a, b, c); }
#else
K3_FN float k3_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
K3_FN float k3_sqrt(float a) { return __builtin_sqrtf(a); }

/* ---- for kernels_common/simt_leaves.h ------------------------------------------------------------- */

/* The value of the lane M away in this team of 16, which is a DPP row: row_ror by M. A rotation is the same
 * as an exchange here, because simt_leaves.h asks for 8, 4, 2, 1 in this order and before step M the values
 * repeat every 2 M lanes. */
template <int M>
K3_FN float k3_team_partner(float v) {
    return k3_bits_to_f32((uint32_t)__builtin_amdgcn_update_dpp(0, (int)k3_f32_to_bits(v), 0x120 + M, 0xf, 0xf, true));
}

typedef uint32_t K3Words4 __attribute__((ext_vector_type(4)));

/* Four words from 16-byte aligned memory. */
K3_FN void k3_load4(const void *p, uint32_t w[4]) {
    const K3Words4 v = *(const K3Words4 *)p;
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

/* The same for weights, which are read once a step: do not keep them in the cache. */
K3_FN void k3_stream4(const void *p, uint32_t w[4]) {
    const K3Words4 v = __builtin_nontemporal_load((const K3Words4 *)p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
K3_FN uint32_t k3_stream1(const void *p) { return __builtin_nontemporal_load((const uint32_t *)p); }

#endif

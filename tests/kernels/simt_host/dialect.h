/* The dialect of a GPU block on the host: every lane is a fiber (lanes.h), so that kernels_common/simt_leaves.h
 * and the op bodies' K3_FOR, K3_SYNC and K3_LANE0 run as they are written, without a GPU.
 *
 * K3_HOST_LANES 256 imitates kernels_cuda/dialect.h (partner by exclusive or), 512 kernels_hip/dialect.h
 * (partner by rotation). Says nothing about compilers, memory models or the GPU's own arithmetic. */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

#include <stddef.h>
#include <stdint.h>

#include "lanes.h"

#define K3_FN static inline
#define K3_INLINE static inline
#define K3_MEMBER inline
#define K3_LEAF static __attribute__((unused, noinline))
#define K3_TILE_LEAF K3_LEAF
#define K3_SMALL_LEAF K3_LEAF
#define K3_UNROLL
#define K3_RESTRICT __restrict__
#define K3_STATIC_ASSERT(condition, text) static_assert(condition, text)

#define K3_BLOCK_LANES ((uint32_t)K3_HOST_LANES)
#define K3_LANE (k3_host_lane)
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo) + K3_LANE; i < (hi); i += K3_BLOCK_LANES)
#define K3_LANE0 (K3_LANE == 0u)
#ifdef K3_HOST_NO_SYNC /* negative control: what an interpreter without barriers would compute */
#define K3_SYNC(c) ((void)(c))
#else
#define K3_SYNC(c) ((void)(c), k3_host_barrier())
#endif

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

K3_FN float k3_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
K3_FN float k3_sqrt(float a) { return __builtin_sqrtf(a); }

template <int M>
K3_FN float k3_team_partner(float v) {
    const uint32_t t = k3_host_lane % 16u;
    return k3_host_exchange(v, K3_HOST_LANES == 256 ? t ^ M : (t - M) % 16u);
}

K3_FN void k3_load4(const void *p, uint32_t w[4]) {
    if ((uintptr_t)p % 16u) k3_host_fail("a 16-byte load is not aligned");
    __builtin_memcpy(w, p, 16);
}
K3_FN void k3_stream4(const void *p, uint32_t w[4]) { k3_load4(p, w); }
K3_FN uint32_t k3_stream1(const void *p) {
    uint32_t w;
    if ((uintptr_t)p % 4u) k3_host_fail("a 4-byte load is not aligned");
    __builtin_memcpy(&w, p, 4);
    return w;
}

#endif

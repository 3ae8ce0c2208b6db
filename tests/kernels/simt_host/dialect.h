/* The dialect of a GPU block on the host: every lane is a fiber (lanes.h), so that kernels_common/simt_leaves.h
 * and the op bodies' K3_FOR, K3_SYNC and K3_LANE0 run as they are written, without a GPU.
 *
 * K3_HOST_LANES 256 imitates kernels_cuda/dialect.h (partner by exclusive or), 512 kernels_hip/dialect.h
 * (partner by rotation). Says nothing about compilers, memory models or the GPU's own arithmetic. */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

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
#define K3_SHARED(type, name) type &name = *(type *)k3_host_shared(sizeof(type)) /* one in all bodies */
#ifdef K3_HOST_NO_SYNC /* negative control: what an interpreter without barriers would compute */
#define K3_SYNC(c) ((void)(c))
#elif defined(K3_HOST_SPARED)
/* The barriers that bodies have met, and the one of them that no lane waits at: test_barriers.py. */
static struct {
    const char *file;
    uint32_t line;
} k3_host_site[128];
static uint32_t k3_host_sites, k3_host_spared_line;
static char k3_host_spared_file[64];
static bool k3_host_is_spared(const char *file, uint32_t line) {
    const char *slash = __builtin_strrchr(file, '/'), *name = slash ? slash + 1 : file;
    uint32_t i = 0;
    while (i < k3_host_sites && (k3_host_site[i].line != line || __builtin_strcmp(k3_host_site[i].file, name))) i++;
    if (i == k3_host_sites && i < 128u) k3_host_site[k3_host_sites++] = {name, line};
    return line == k3_host_spared_line && !__builtin_strcmp(name, k3_host_spared_file);
}
#define K3_SYNC(c) ((void)(c), k3_host_is_spared(__FILE__, __LINE__) ? (void)0 : k3_host_barrier())
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

/* ---- for kernels_common/simt_interp.h: each atomic with the weakest order that the vendor's dialect asks for ---- */

#define K3_BLOCK (k3_host_now->index)
#define K3_DOMAINS 1 /* both vendors' texts with several domains, so that the rendezvous is met in either order of lanes */
#define K3_DEVICE_SCOPE 0u
#define K3_SYSTEM_SCOPE 1u
#define K3_IS_HIP (K3_HOST_LANES == 512)
#define K3_POLLS_ACQUIRE (!K3_IS_HIP)

K3_FN uint32_t k3_look(const uint32_t *p, uint32_t) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
K3_FN uint32_t k3_poll(const uint32_t *p, uint32_t) { return __atomic_load_n(p, K3_IS_HIP ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE); }
K3_FN void k3_acquire(uint32_t) {
    if (K3_IS_HIP) __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
K3_FN void k3_pause(void) { k3_host_pause(); }
K3_FN void k3_add_release(uint32_t *p, uint32_t n) { __atomic_fetch_add(p, n, __ATOMIC_RELEASE); }
K3_FN void k3_release_system(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
K3_FN void k3_add_system(uint32_t *p, uint32_t n) { __atomic_fetch_add(p, n, __ATOMIC_RELAXED); }
K3_FN uint32_t k3_take(uint32_t *cursor) { return __atomic_fetch_add(cursor, 1u, __ATOMIC_RELAXED); }
K3_FN uint32_t k3_count_out(uint32_t *p) { return __atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL); }
K3_FN int k3_swap_zero(uint32_t *p, uint32_t v, uint32_t) {
    uint32_t none = 0;
    return __atomic_compare_exchange_n(p, &none, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
K3_FN void k3_add64(uint64_t *p, uint64_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
K3_FN void k3_block_add(uint64_t *shared, uint64_t v) { *shared += v; } /* one thread a block */
K3_FN uint64_t k3_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
K3_FN uint32_t k3_domain(void) { return k3_host_now->domain; }
/* Blocks of a domain share an L2: the order that its own traffic has. */
#define K3_RETIRE(b) K3_SYNC(b)
K3_FN uint32_t k3_domain_count(uint32_t *p) { return __atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL); }
K3_FN void k3_domain_open(uint32_t *p) { __atomic_store_n(p, 1u, __ATOMIC_RELEASE); }
K3_FN int k3_domain_is_open(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE) != 0u; }
K3_FN void k3_domain_acquire(void) {}

#endif

/* The words that differ between targets, as HIP C++ for a block of 512 lanes (8 waves of 64). The same words
 * are in kernels_cpu/dialect.h and kernels_cuda/dialect.h; the include path chooses.
 *
 * Compiled by clang with -nogpuinc -nogpulib and by hipRTC: only compiler builtins, no header and no device
 * library, so that what is compiled without ROCm is what runs with it.
 * Numerics: needs -ffp-contract=off -fgpu-flush-denormals-to-zero -fhip-fp32-correctly-rounded-divide-sqrt
 * (rule 1). */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

/* Before ROCm 7 hipRTC declares some of these names itself, those of 64 bits as long long, which no typedef may change:
 * from here on they mean ours. */
#ifdef __HIPCC_RTC__
#define uint8_t k3_uint8
#define uint16_t k3_uint16
#define uint32_t k3_uint32
#define uint64_t k3_uint64
#define int32_t k3_int32
#define int64_t k3_int64
#endif
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
#endif
#undef __launch_bounds__ /* HIP's own says at most so many lanes, and registers are dealt out for fewer */
#define __launch_bounds__(lanes) __attribute__((amdgpu_flat_work_group_size(lanes, lanes)))

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
#define K3_LANE (k3_lane())

/* Not known to be the same at every call: inside the interpreter's loop whatever any op derives from it would be
 * computed once, before the loop, and kept in registers of which there are not as many. */
K3_FN uint32_t k3_lane(void) {
    uint32_t lane = __builtin_amdgcn_workitem_id_x();
    asm volatile("" : "+v"(lane));
    return lane;
}

/* The lanes of the block share the iterations of [lo, hi); see kernels_cpu/dialect.h for what a body may do. */
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo) + K3_LANE; i < (hi); i += K3_BLOCK_LANES)
#define K3_LANE0 (K3_LANE == 0u)
#define K3_SHARED(type, name) __shared__ type name /* an object of the block's LDS */
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

/* ---- for kernels_common/simt_interp.h ------------------------------------------------------------- */

#define K3_BLOCK ((uint32_t)__builtin_amdgcn_workgroup_id_x())
#define K3_DOMAINS 1 /* several L2 caches: windows and the two-level rendezvous are compiled in */
#define K3_DEVICE_SCOPE 0u
#define K3_SYSTEM_SCOPE 1u /* other ranks' devices and the host */

/* This wave's stores have reached the L2, its write-backs and invalidations have been done. vmcnt(0), the other counts at
 * their most. Spelled behind every fence: before LLVM 23 a wait behind buffer_wbl2 is taken out where no load or store is
 * under way (llvm-project, pull request 178316), which K3_RETIRE has just seen to; the counter would overtake the write-back.
 * For the same reason no read-modify-write has an order of its own. */
K3_FN void k3_drain(void) { __builtin_amdgcn_s_waitcnt(0x0f70); }

/* A barrier behind which every wave's stores have reached the L2. The fence alone lets them be under way: inside a
 * workgroup nobody could tell, but the counter that one lane then adds to may lie in another channel and overtake
 * them. */
K3_FN void k3_block_retire(void) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    k3_drain();
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#define K3_RETIRE(b) ((void)(b), k3_block_retire())

#define K3_POLLS_ACQUIRE 0
/* A look orders nothing. Polls are looks: an acquire inside the loop would invalidate caches at every turn. */
K3_FN uint32_t k3_look(const uint32_t *p, uint32_t scope) {
    if (scope == K3_SYSTEM_SCOPE) return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
K3_FN uint32_t k3_poll(const uint32_t *p, uint32_t scope) { return k3_look(p, scope); }
K3_FN void k3_acquire(uint32_t scope) {
    if (scope == K3_SYSTEM_SCOPE) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
    else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    k3_drain(); /* one wave invalidates for all: the others must not load before it has been done */
}
K3_FN void k3_pause(void) { __builtin_amdgcn_s_sleep(8); }

/* Writes the L2 back. */
K3_FN void k3_release(uint32_t scope) {
    if (scope == K3_SYSTEM_SCOPE) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    k3_drain();
}
K3_FN void k3_add_release(uint32_t *p, uint32_t n) {
    k3_release(K3_DEVICE_SCOPE);
    (void)__hip_atomic_fetch_add(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

/* Before one or more k3_add_system: what they then announce is visible to other devices. */
K3_FN void k3_release_system(void) { k3_release(K3_SYSTEM_SCOPE); }
K3_FN void k3_add_system(uint32_t *p, uint32_t n) {
    (void)__hip_atomic_fetch_add(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

/* The cursor's value before; a cursor orders nothing. */
K3_FN uint32_t k3_take(uint32_t *cursor) {
    return __hip_atomic_fetch_add(cursor, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

/* Both directions: who counts last sees what all others did. */
K3_FN uint32_t k3_count_out(uint32_t *p) {
    k3_release(K3_DEVICE_SCOPE);
    const uint32_t n = __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    k3_acquire(K3_DEVICE_SCOPE);
    return n;
}

/* Whether *p was 0 and now is v. */
K3_FN int k3_swap_zero(uint32_t *p, uint32_t v, uint32_t scope) {
    uint32_t none = 0u;
    k3_release(scope);
    if (scope == K3_SYSTEM_SCOPE)
        __hip_atomic_compare_exchange_strong(p, &none, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    else __hip_atomic_compare_exchange_strong(p, &none, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    k3_acquire(scope);
    return none == 0u;
}

K3_FN void k3_add64(uint64_t *p, uint64_t v) {
    (void)__hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
K3_FN void k3_block_add(uint64_t *shared, uint64_t v) {
    (void)__hip_atomic_fetch_add(shared, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

/* Ticks of 10 ns; the launch's deadline is in the same unit. */
K3_FN uint64_t k3_clock(void) { return __builtin_amdgcn_s_memrealtime(); }

/* The XCD: four bits of the hardware register 20. */
K3_FN uint32_t k3_domain(void) { return (uint32_t)__builtin_amdgcn_s_getreg(20 | (3 << 11)); }

/* Words that only one domain uses. K3_RETIRE comes before a count, so whoever counts last releases what all have in
 * the L2 they share; relaxed, because an order at device scope is the cost that the rendezvous saves. */
K3_FN uint32_t k3_domain_count(uint32_t *p) {
    return __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
K3_FN void k3_domain_open(uint32_t *p) { __hip_atomic_store(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
K3_FN int k3_domain_is_open(const uint32_t *p) { return k3_look(p, K3_DEVICE_SCOPE) != 0u; }

/* The elected block has invalidated the L2; this drops what the own compute unit keeps. No scope of the language means
 * "those who share an L2", so the instruction is spelled. Not yet run on a device. */
K3_FN void k3_domain_acquire(void) {
    asm volatile("buffer_inv sc0" ::: "memory");
    k3_drain();
}

#endif

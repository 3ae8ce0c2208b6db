/* The dialect of a block that one thread plays and that says what it does: kernels_common/simt_interp.h as it is, each word of
 * the protocol a line of text. `records_hip` is the vendor whose way of waiting is taken.
 *
 * A plain store has no word. Counters that it clears are found by looking, before each line, at what had a value. */
#ifndef K3_DIALECT_H
#define K3_DIALECT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define K3_FN static inline
#define K3_INLINE static inline
#define K3_MEMBER inline
#define K3_LEAF static __attribute__((unused))
#define K3_TILE_LEAF K3_LEAF
#define K3_SMALL_LEAF K3_LEAF
#define K3_UNROLL
#define K3_RESTRICT __restrict__
#define K3_STATIC_ASSERT(condition, text) static_assert(condition, text)
#define K3_BLOCK_LANES 256u
#define K3_LANE 0u
#define K3_LANE0 1
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo); i < (hi); i++)
#define K3_SHARED(type, name) static type name

K3_FN float k3_bits_to_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
K3_FN uint32_t k3_f32_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
K3_FN float k3_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
K3_FN float k3_sqrt(float a) { return __builtin_sqrtf(a); }
template <int M>
K3_FN float k3_team_partner(float v) {
    return v;
}
K3_FN void k3_load4(const void *p, uint32_t w[4]) { memcpy(w, p, 16); }
K3_FN void k3_stream4(const void *p, uint32_t w[4]) { memcpy(w, p, 16); }
K3_FN uint32_t k3_stream1(const void *p) { return *(const uint32_t *)p; }

static int records_hip;
/* record.cpp: a line of a word, of what it is about, of a number. */
static void record(const char *word, const uint32_t *about, uint32_t n);
static void record_scope(const char *word, const uint32_t *about, uint32_t n, uint32_t scope);
static void look_for_stores();

#define K3_SYNC(c) ((void)(c), record("sync", NULL, 0u))
#define K3_BLOCK 0u
#define K3_DOMAINS 1 /* as on the emulated blocks: windows of one domain are then CUDA's */
#define K3_DEVICE_SCOPE 0u
#define K3_SYSTEM_SCOPE 1u
#define K3_POLLS_ACQUIRE (!records_hip)
#define K3_RETIRE(b) ((void)(b), record("retire", NULL, 0u))

K3_FN uint32_t k3_look(const uint32_t *p, uint32_t) { return look_for_stores(), *p; }
K3_FN uint32_t k3_poll(const uint32_t *p, uint32_t scope) {
    record_scope("poll", p, *p, scope);
    return *p;
}
K3_FN void k3_acquire(uint32_t scope) {
    if (records_hip) record_scope("acquire", NULL, 0u, scope);
}
K3_FN void k3_pause(void) {}
K3_FN void k3_add_release(uint32_t *p, uint32_t n) { record("add_release", p, n), *p += n; }
K3_FN void k3_release_system(void) { record("release_system", NULL, 0u); }
K3_FN void k3_add_system(uint32_t *p, uint32_t n) { record("add_system", p, n), *p += n; }
K3_FN uint32_t k3_take(uint32_t *cursor) {
    record("take", cursor, 1u);
    return (*cursor)++;
}
K3_FN uint32_t k3_count_out(uint32_t *p) {
    record("count_out", p, 1u);
    return (*p)++;
}
K3_FN int k3_swap_zero(uint32_t *p, uint32_t v, uint32_t) { return *p == 0u ? *p = v, 1 : 0; }
K3_FN void k3_add64(uint64_t *p, uint64_t v) { *p += v; }
K3_FN void k3_block_add(uint64_t *shared, uint64_t v) { *shared += v; }
K3_FN uint64_t k3_clock(void) { /* no wait is long: what never comes is given up at the first look at the clock */
    static uint64_t now;
    return now += 1000u;
}
K3_FN uint32_t k3_domain(void) { return 0u; }
K3_FN uint32_t k3_domain_count(uint32_t *p) {
    record("domain_count", p, 1u);
    return (*p)++;
}
K3_FN void k3_domain_open(uint32_t *p) { record("domain_open", p, 1u), *p = 1u; }
K3_FN int k3_domain_is_open(const uint32_t *p) {
    record("domain_is_open", p, *p);
    return *p != 0u;
}
K3_FN void k3_domain_acquire(void) { record("domain_acquire", NULL, 0u); }

#endif

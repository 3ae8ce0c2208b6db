/* AVX-512 vector primitives for tiles.h: 16 binary32 lanes, a rule-3 row is 4 vectors.
 *
 * Vector v of a row holds lanes 16v .. 16v+15 of rule 3 in natural order, that is pairs 16v .. of a chunk. */
#ifndef K3_LEAVES_AVX512_H
#define K3_LEAVES_AVX512_H

#include <immintrin.h>

#include "mxfp4_table.h"
#include "scalar.h"

#define K3V_INLINE static inline __attribute__((always_inline))

typedef __m512 k3v_f;
typedef struct {
    k3v_f odd, even;
} k3v_pair;

#define K3V_LANES 16
#define K3V_PER_ROW 4
#define K3V_ROWS 4 /* rows whose accumulators fit the register file together */
#define K3V_TOKS 4 /* tokens a prefill tile takes beside four rows */
#define K3V_PASS_ROWS 4 /* of those rows, at a time */

K3V_INLINE k3v_f k3v_zero(void) { return _mm512_setzero_ps(); }
K3V_INLINE k3v_f k3v_set(float x) { return _mm512_set1_ps(x); }
K3V_INLINE k3v_f k3v_load(const float *p) { return _mm512_loadu_ps(p); }
K3V_INLINE void k3v_store(float *p, k3v_f a) { _mm512_storeu_ps(p, a); }
K3V_INLINE k3v_f k3v_add(k3v_f a, k3v_f b) { return _mm512_add_ps(a, b); }
K3V_INLINE k3v_f k3v_fma(k3v_f a, k3v_f b, k3v_f c) { return _mm512_fmadd_ps(a, b, c); }

K3V_INLINE k3v_f k3v_load_bf16(const uint16_t *p) {
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}

/* 32 neighbouring binary32 -> their 16 odd and 16 even elements. */
K3V_INLINE k3v_pair k3v_split_f32(const float *p) {
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 lo = _mm512_loadu_ps(p), hi = _mm512_loadu_ps(p + 16);
    k3v_pair r;
    r.odd = _mm512_permutex2var_ps(lo, odd, hi);
    r.even = _mm512_permutex2var_ps(lo, even, hi);
    return r;
}

/* 32 neighbouring bf16: a dword is a pair, its high half the odd element. */
K3V_INLINE k3v_pair k3v_split_bf16(const uint16_t *p) {
    const __m512i w = _mm512_loadu_si512((const void *)p);
    k3v_pair r;
    r.odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
    r.even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    return r;
}

/* ---- MXFP4: one vector is one scale group ----
 *
 * Weights come out as pairs of bf16 in a lane order of their own (below), 128-bit part q, element d holding
 * pair 4d + q: then one multishift of the 16 broadcast bytes makes all 32 table indices. x is split into the
 * same order, and k3v_quads_mx reduces it. */

#define K3V_MX_VECTORS 1 /* vectors per scale group */

/* Row s: dword c holds code c's bf16 twice, because an index has a bit of the next nibble at its low end. */
#define K3V_MX_CODE(c, s) ((((s) ? (uint32_t)(c) >> 3 << 31 : 0u) | K3_MX_BITS((c)&7, s)) >> 16) * 0x10001u
#define K3V_MX_ROW(s)                                                                                         \
    {K3V_MX_CODE(0, s),  K3V_MX_CODE(1, s),  K3V_MX_CODE(2, s),  K3V_MX_CODE(3, s),  K3V_MX_CODE(4, s),       \
     K3V_MX_CODE(5, s),  K3V_MX_CODE(6, s),  K3V_MX_CODE(7, s),  K3V_MX_CODE(8, s),  K3V_MX_CODE(9, s),       \
     K3V_MX_CODE(10, s), K3V_MX_CODE(11, s), K3V_MX_CODE(12, s), K3V_MX_CODE(13, s), K3V_MX_CODE(14, s),      \
     K3V_MX_CODE(15, s)}
static const uint32_t k3v_mx_rows[256][16] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_ROW)};

/* Bit positions for byte 4d + q of each part: its low nibble less one bit, then its high nibble less one bit. */
#define K3V_MX_SHIFT(q)                                                                                 \
    ((uint64_t)((8 * (q) + 63) & 63) | (uint64_t)((8 * (q) + 3) & 63) << 16 |                           \
     (uint64_t)((8 * (q) + 31) & 63) << 32 | (uint64_t)((8 * (q) + 35) & 63) << 48)

/* 16 packed bytes under scale byte s -> 32 bf16, a dword a pair. */
K3V_INLINE __m512i k3v_mx_pairs(const uint8_t *p, uint32_t s) {
    const __m512i shift =
        _mm512_setr_epi64((long long)K3V_MX_SHIFT(0), (long long)K3V_MX_SHIFT(0), (long long)K3V_MX_SHIFT(1),
                          (long long)K3V_MX_SHIFT(1), (long long)K3V_MX_SHIFT(2), (long long)K3V_MX_SHIFT(2),
                          (long long)K3V_MX_SHIFT(3), (long long)K3V_MX_SHIFT(3));
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m512i table = _mm512_load_si512((const void *)k3v_mx_rows[s]);
    return _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(shift, bytes), table);
}

K3V_INLINE k3v_pair k3v_split_mx(const uint8_t *p, uint32_t s) {
    const __m512i w = k3v_mx_pairs(p, s);
    k3v_pair r;
    r.odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
    r.even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    return r;
}

/* 32 neighbouring binary32 in the order of k3v_split_mx. */
K3V_INLINE k3v_pair k3v_split_x_mx(const float *p) {
    const __m512i odd = _mm512_setr_epi32(1, 9, 17, 25, 3, 11, 19, 27, 5, 13, 21, 29, 7, 15, 23, 31);
    const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
    const __m512 lo = _mm512_loadu_ps(p), hi = _mm512_loadu_ps(p + 16);
    k3v_pair r;
    r.odd = _mm512_permutex2var_ps(lo, odd, hi);
    r.even = _mm512_permutex2var_ps(lo, even, hi);
    return r;
}

/* The same pairs in natural order, stored as 32 neighbouring bf16. */
K3V_INLINE void k3v_mx_store_bf16(uint16_t *out, const uint8_t *p, uint32_t s) {
    const __m512i natural = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512((void *)out, _mm512_permutexvar_epi32(natural, k3v_mx_pairs(p, s)));
}

/* ---- cross-lane order of rule 3 ---- */

/* Add elements 0 and 2, 1 and 3 (then 0 and 1) of neighbouring quads: two vectors become one. */
K3V_INLINE k3v_f k3v_quad2(k3v_f a, k3v_f b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
K3V_INLINE k3v_f k3v_quad1(k3v_f a, k3v_f b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* The 16 quad sums of a row: element v of 128-bit part q is quad 4v + q. */
K3V_INLINE k3v_f k3v_quads(const k3v_f *acc) {
    return k3v_quad1(k3v_quad2(acc[0], acc[1]), k3v_quad2(acc[2], acc[3]));
}

/* The same from k3v_split_mx's order: a quad's lanes lie in the four parts. Part v of the result holds vector v's
 * quads, element d quad 4v + d; k3v_quads has parts and elements the other way round, so transpose. */
K3V_INLINE k3v_f k3v_quads_mx(const k3v_f *acc) {
    const __m512 a0 = _mm512_shuffle_f32x4(acc[0], acc[1], 0x44), a1 = _mm512_shuffle_f32x4(acc[0], acc[1], 0xee);
    const __m512 b0 = _mm512_shuffle_f32x4(acc[2], acc[3], 0x44), b1 = _mm512_shuffle_f32x4(acc[2], acc[3], 0xee);
    const __m512 a = _mm512_add_ps(a0, a1), b = _mm512_add_ps(b0, b1);
    const __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), t);
}

/* Halve four rows of quad sums together: 8 and 4 lie inside a part, 2 and 1 across parts. */
K3V_INLINE __m128 k3v_fold4(k3v_f a, k3v_f b, k3v_f c, k3v_f d) {
    const __m512 t = k3v_quad1(k3v_quad2(a, b), k3v_quad2(c, d));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(t), _mm512_extractf32x8_ps(t, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

#endif

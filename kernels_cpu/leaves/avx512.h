/* AVX-512 vector primitives for tiles.h: 16 binary32 lanes, a rule-3 row is 4 vectors.
 *
 * Vector v of a row holds lanes 16v .. 16v+15 of rule 3 in natural order, that is pairs 16v .. of a chunk. */
#ifndef K3_LEAVES_AVX512_H
#define K3_LEAVES_AVX512_H

#include <immintrin.h>

#include "scalar.h"

#define K3V_INLINE static inline __attribute__((always_inline))

typedef __m512 k3v_f;
typedef __m512 k3v_table; /* 16 E2M1 values, scaled */
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

/* ---- MXFP4: one vector is one scale group ---- */

#define K3V_MX_VECTORS 1 /* vectors per scale group */

K3V_INLINE k3v_table k3v_mx_table(float scale) {
    const __m512 e2m1 = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                       -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return _mm512_mul_ps(e2m1, _mm512_set1_ps(scale));
}

/* 16 scale bytes -> 2^(s - 127). s = 0 gives 0. */
K3V_INLINE void k3v_mx_widen(__m128i bytes, float *scale) {
    _mm512_storeu_si512((void *)scale, _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}

/* Pairs whose values bf16 holds exactly, stored as 32 neighbouring bf16. */
K3V_INLINE void k3v_store_bf16(uint16_t *out, k3v_pair p) {
    _mm512_storeu_si512((void *)out, _mm512_or_si512(_mm512_castps_si512(p.odd),
                                                     _mm512_srli_epi32(_mm512_castps_si512(p.even), 16)));
}

/* 16 packed bytes -> 16 odd (high nibble) and 16 even (low nibble) weights. vpermps reads 4 index bits, so the
 * other nibble of each widened byte needs no masking. */
K3V_INLINE k3v_pair k3v_split_mx(const uint8_t *p, k3v_table t) {
    const __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    k3v_pair r;
    r.odd = _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4), t);
    r.even = _mm512_permutexvar_ps(w, t);
    return r;
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

/* Halve four rows of quad sums together: 8 and 4 lie inside a part, 2 and 1 across parts. */
K3V_INLINE __m128 k3v_fold4(k3v_f a, k3v_f b, k3v_f c, k3v_f d) {
    const __m512 t = k3v_quad1(k3v_quad2(a, b), k3v_quad2(c, d));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(t), _mm512_extractf32x8_ps(t, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

#endif

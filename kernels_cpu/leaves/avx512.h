/* AVX-512 vector primitives for tiles.h: 16 binary32 lanes, a rule-3 row is 4 vectors.
 *
 * Vector v of a row holds lanes 16v .. 16v+15 of rule 3 in natural order, that is pairs 16v .. of a chunk. */
#ifndef K3_LEAVES_AVX512_H
#define K3_LEAVES_AVX512_H

#include <immintrin.h>

#include "mxfp4_table.h"
#include "scalar.h"

#define K3V_INLINE static inline __attribute__((always_inline))
#define K3V_UNROLL _Pragma("GCC unroll 8")

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

/* Sixteen rows become sixteen columns. */
K3V_INLINE void k3v_transpose(k3v_f *r) {
    k3v_f t[16];
    K3V_UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    K3V_UNROLL
    for (int i = 0; i < 16; i += 4)
        K3V_UNROLL
        for (int j = 0; j < 2; j++) {
            const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    K3V_UNROLL
    for (int i = 0; i < 16; i += 8)
        K3V_UNROLL
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    K3V_UNROLL
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
    }
}

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

/* ---- MXFP4: one vector is one scale group, its 16 pairs in natural order ---- */

#define K3V_MX_ROWS 4  /* rows side by side, which share the loads of x */
#define K3V_MX_PARTS 4 /* steps a chunk, each of one accumulator a row */

/* Row s: the 16 codes' values. The row of K3_MX_ABSENT is -0 for every code. */
#define K3V_MX_CODE(c, s) \
    ((s) == K3_MX_ABSENT ? 0x80000000u : (((s) ? (uint32_t)(c) >> 3 << 31 : 0u) | K3_MX_BITS((c)&7, s)))
#define K3V_MX_ROW(s)                                                                                         \
    {K3V_MX_CODE(0, s),  K3V_MX_CODE(1, s),  K3V_MX_CODE(2, s),  K3V_MX_CODE(3, s),  K3V_MX_CODE(4, s),       \
     K3V_MX_CODE(5, s),  K3V_MX_CODE(6, s),  K3V_MX_CODE(7, s),  K3V_MX_CODE(8, s),  K3V_MX_CODE(9, s),       \
     K3V_MX_CODE(10, s), K3V_MX_CODE(11, s), K3V_MX_CODE(12, s), K3V_MX_CODE(13, s), K3V_MX_CODE(14, s),      \
     K3V_MX_CODE(15, s)}
static const uint32_t k3v_mx_rows[256][16] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_ROW)};

/* 16 packed bytes under scale byte s. vpermps reads four index bits, so the byte itself chooses the even element. */
K3V_INLINE k3v_pair k3v_mx_weights(const uint8_t *p, uint32_t s) {
    const __m512 table = _mm512_load_ps((const void *)k3v_mx_rows[s]);
    const __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    k3v_pair r;
    r.odd = _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4), table);
    r.even = _mm512_permutexvar_ps(w, table);
    return r;
}

/* A chunk of x: for each group 16 odd, then 16 even elements. */
K3V_INLINE void k3v_mx_split_x(const float *p, float *out) {
    for (uint32_t i = 0; i < K3_CHUNK; i += K3_MX_GROUP) {
        const k3v_pair x = k3v_split_f32(p + i);
        k3v_store(out + i, x.odd);
        k3v_store(out + i + 16u, x.even);
    }
}

/* Group `part` of the chunk that begins at group g and has its split x at x, for all rows. */
K3V_INLINE void k3v_mx_step_f32(int part, const uint8_t *const *w, const uint8_t *const *s, uint64_t g, const float *x,
                                k3v_f (*acc)[K3V_PER_ROW]) {
    const k3v_pair xv = {k3v_load(x + 32 * part), k3v_load(x + 32 * part + 16)};
    const uint64_t group = g + (uint64_t)part;
    K3V_UNROLL
    for (int r = 0; r < K3V_MX_ROWS; r++) {
        const k3v_pair wv = k3v_mx_weights(w[r] + 16u * group, s[r][group]);
        acc[r][part] = k3v_fma(wv.even, xv.even, k3v_fma(wv.odd, xv.odd, acc[r][part]));
    }
}

/* Four groups as 128 neighbouring bf16. */
K3V_INLINE void k3v_mx_store_bf16(uint16_t *out, const uint8_t *w, const uint8_t *s) {
    for (uint32_t g = 0; g < 4u; g++) {
        const k3v_pair v = k3v_mx_weights(w + 16u * g, s[g]);
        const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(v.even), 16);
        _mm512_storeu_si512((void *)(out + K3_MX_GROUP * g), _mm512_or_si512(_mm512_castps_si512(v.odd), even));
    }
}

/* ---- cross-lane order of rule 3 ---- */

/* Add elements 0 and 2, 1 and 3 (then 0 and 1) of neighbouring quads: two vectors become one. Half of a and half of
 * b meet their other halves: a blend and a shuffle, where two shuffles would wait for the same port. */
K3V_INLINE k3v_f k3v_quad2(k3v_f a, k3v_f b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xccccu, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
K3V_INLINE k3v_f k3v_quad1(k3v_f a, k3v_f b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* The same of 128-bit parts. */
K3V_INLINE k3v_f k3v_halve_parts(k3v_f a, k3v_f b) { /* parts a0 + a2, a1 + a3, b0 + b2, b1 + b3 */
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00u, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
K3V_INLINE k3v_f k3v_halve_pairs(k3v_f a, k3v_f b) { /* parts a0 + a1, b0 + b1, a2 + a3, b2 + b3 */
    const __m512i other = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0u, a, b), _mm512_permutex2var_ps(a, other, b));
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

/* Four rows of k3v_mx_step_f32, whose lanes are in natural order. */
K3V_INLINE __m128 k3v_mx_fold_f32(k3v_f (*acc)[K3V_PER_ROW]) {
    return k3v_fold4(k3v_quads(acc[0]), k3v_quads(acc[1]), k3v_quads(acc[2]), k3v_quads(acc[3]));
}

/* Four rows over four blocks, q[r][b] the quad sums: a part of the result is a row's four block sums, rows in the
 * order 0 2 1 3. */
K3V_INLINE k3v_f k3v_mx_square_f32(k3v_f (*q)[4]) {
    k3v_f t[4]; /* element b, the quads still in the parts */
    K3V_UNROLL
    for (int r = 0; r < 4; r++) t[r] = k3v_quad1(k3v_quad2(q[r][0], q[r][1]), k3v_quad2(q[r][2], q[r][3]));
    return k3v_halve_pairs(k3v_halve_parts(t[0], t[1]), k3v_halve_parts(t[2], t[3]));
}

#endif

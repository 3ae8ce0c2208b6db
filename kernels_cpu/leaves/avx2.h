/* AVX2 vector primitives for tiles.h: 8 binary32 lanes, a rule-3 row is 8 vectors.
 *
 * Vector v of a row holds lanes 8v .. 8v+7 of rule 3 in natural order, that is pairs 8v .. of a chunk. */
#ifndef K3_LEAVES_AVX2_H
#define K3_LEAVES_AVX2_H

#include <immintrin.h>

#include "mxfp4_table.h"
#include "scalar.h"

#define K3V_INLINE static inline __attribute__((always_inline))
#define K3V_UNROLL _Pragma("GCC unroll 8")

typedef __m256 k3v_f;
typedef struct {
    k3v_f odd, even;
} k3v_pair;

#define K3V_LANES 8
#define K3V_PER_ROW 8
#define K3V_ROWS 1 /* one row's 8 accumulators are half the register file */
#define K3V_TOKS 4 /* tokens a prefill tile takes beside four rows */
#define K3V_PASS_ROWS 2 /* of those rows, at a time: 8 accumulators */

K3V_INLINE k3v_f k3v_zero(void) { return _mm256_setzero_ps(); }
K3V_INLINE k3v_f k3v_set(float x) { return _mm256_set1_ps(x); }
K3V_INLINE k3v_f k3v_load(const float *p) { return _mm256_loadu_ps(p); }
K3V_INLINE void k3v_store(float *p, k3v_f a) { _mm256_storeu_ps(p, a); }
K3V_INLINE k3v_f k3v_add(k3v_f a, k3v_f b) { return _mm256_add_ps(a, b); }
K3V_INLINE k3v_f k3v_fma(k3v_f a, k3v_f b, k3v_f c) { return _mm256_fmadd_ps(a, b, c); }

/* Eight rows become eight columns. */
K3V_INLINE void k3v_transpose(k3v_f *r) {
    k3v_f t[8];
    K3V_UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    K3V_UNROLL
    for (int i = 0; i < 8; i += 4)
        K3V_UNROLL
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    K3V_UNROLL
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
    }
    K3V_UNROLL
    for (int j = 0; j < 8; j++) r[j] = t[j];
}

K3V_INLINE k3v_f k3v_load_bf16(const uint16_t *p) {
    const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

/* 16 neighbouring binary32 -> their 8 odd and 8 even elements. Loading quarters 0, 2 and 1, 3 lets the
 * in-part shuffle leave natural order; loading halves would need two more cross-part permutes. */
K3V_INLINE k3v_pair k3v_split_f32(const float *p) {
    const __m256 lo = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
    const __m256 hi =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(p + 12), 1);
    k3v_pair r;
    r.odd = _mm256_shuffle_ps(lo, hi, 0xdd);
    r.even = _mm256_shuffle_ps(lo, hi, 0x88);
    return r;
}

/* 16 neighbouring bf16: a dword is a pair, its high half the odd element. */
K3V_INLINE k3v_pair k3v_split_bf16(const uint16_t *p) {
    const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)p);
    k3v_pair r;
    r.odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000u)));
    r.even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    return r;
}

/* ---- MXFP4: two scale groups at a time, one in each 128-bit part ----
 *
 * vpshufb looks up both bytes of 32 bf16 in tables of their group; unpacking makes pairs of them, vector k of four
 * holding pairs 4k .. 4k + 3 of the first group in its low part, of the second in its high part. */

#define K3V_MX_ROWS 1  /* rows side by side: one row's 8 accumulators are half the register file */
#define K3V_MX_PARTS 2 /* steps a chunk, each of four accumulators */

/* Row s: the high bytes of the 16 codes' bf16, then the low bytes. The row of K3_MX_ABSENT is -0 for every code. */
#define K3V_MX_CODE(c, s) \
    ((s) == K3_MX_ABSENT ? 0x80000000u : (((s) ? (uint32_t)(c) >> 3 << 31 : 0u) | K3_MX_BITS((c)&7, s)))
#define K3V_MX_HIGH(c, s) (uint8_t)(K3V_MX_CODE(c, s) >> 24)
#define K3V_MX_LOW(c, s) (uint8_t)(K3V_MX_CODE(c, s) >> 16)
#define K3V_MX_BYTES(BYTE, s)                                                                               \
    BYTE(0, s), BYTE(1, s), BYTE(2, s), BYTE(3, s), BYTE(4, s), BYTE(5, s), BYTE(6, s), BYTE(7, s),         \
        BYTE(8, s), BYTE(9, s), BYTE(10, s), BYTE(11, s), BYTE(12, s), BYTE(13, s), BYTE(14, s), BYTE(15, s)
#define K3V_MX_ROW(s) {K3V_MX_BYTES(K3V_MX_HIGH, s), K3V_MX_BYTES(K3V_MX_LOW, s)}
static const uint8_t k3v_mx_rows[256][32] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_ROW)};

/* 32 packed bytes under scale bytes s[0], s[1] -> four vectors of pairs. */
K3V_INLINE void k3v_mx_pairs(const uint8_t *p, const uint8_t *s, __m256i *pair) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m128i *first = (const __m128i *)(const void *)k3v_mx_rows[s[0]];
    const __m128i *second = (const __m128i *)(const void *)k3v_mx_rows[s[1]];
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128(first)), _mm_load_si128(second), 1);
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128(first + 1)), _mm_load_si128(second + 1), 1);
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i even = _mm256_and_si256(bytes, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    const __m256i even_high = _mm256_shuffle_epi8(high, even), even_low = _mm256_shuffle_epi8(low, even);
    const __m256i odd_high = _mm256_shuffle_epi8(high, odd), odd_low = _mm256_shuffle_epi8(low, odd);
    const __m256i e0 = _mm256_unpacklo_epi8(even_low, even_high), e1 = _mm256_unpackhi_epi8(even_low, even_high);
    const __m256i o0 = _mm256_unpacklo_epi8(odd_low, odd_high), o1 = _mm256_unpackhi_epi8(odd_low, odd_high);
    pair[0] = _mm256_unpacklo_epi16(e0, o0);
    pair[1] = _mm256_unpackhi_epi16(e0, o0);
    pair[2] = _mm256_unpacklo_epi16(e1, o1);
    pair[3] = _mm256_unpackhi_epi16(e1, o1);
}

/* A chunk of x in that order: for each vector of pairs 8 odd, then 8 even elements. */
K3V_INLINE void k3v_mx_split_x(const float *p, float *out) {
    for (uint32_t i = 0; i < K3_CHUNK; i += 2u * K3_MX_GROUP)
        for (uint32_t k = 0; k < 4u; k++) {
            const float *first = p + i + 8u * k, *second = first + K3_MX_GROUP;
            const __m256 lo = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(first)), _mm_loadu_ps(second), 1);
            const __m256 hi = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(first + 4)), _mm_loadu_ps(second + 4), 1);
            _mm256_store_ps(out + i + 16u * k, _mm256_shuffle_ps(lo, hi, 0xdd));
            _mm256_store_ps(out + i + 16u * k + 8u, _mm256_shuffle_ps(lo, hi, 0x88));
        }
}

/* Groups 2 part and 2 part + 1 of the chunk that begins at group g and has its split x at x. */
K3V_INLINE void k3v_mx_step_f32(int part, const uint8_t *const *w, const uint8_t *const *s, uint64_t g, const float *x,
                                k3v_f (*acc)[K3V_PER_ROW]) {
    const uint64_t group = g + 2u * (uint64_t)part;
    __m256i pair[4];
    k3v_mx_pairs(w[0] + 16u * group, s[0] + group, pair);
    K3V_UNROLL
    for (int k = 0; k < 4; k++) {
        const float *xk = x + 64 * part + 16 * k;
        k3v_f *a = &acc[0][4 * part + k];
        const __m256i odd = _mm256_and_si256(pair[k], _mm256_set1_epi32((int)0xffff0000u));
        *a = k3v_fma(_mm256_castsi256_ps(odd), _mm256_load_ps(xk), *a);
        *a = k3v_fma(_mm256_castsi256_ps(_mm256_slli_epi32(pair[k], 16)), _mm256_load_ps(xk + 8), *a);
    }
}

/* Four groups as 128 neighbouring bf16. */
K3V_INLINE void k3v_mx_store_bf16(uint16_t *out, const uint8_t *w, const uint8_t *s) {
    for (uint32_t h = 0; h < 2u; h++) {
        __m256i pair[4];
        k3v_mx_pairs(w + 32u * h, s + 2u * h, pair);
        for (uint32_t k = 0; k < 4u; k++) {
            uint16_t *first = out + 64u * h + 8u * k;
            _mm_storeu_si128((__m128i *)(void *)first, _mm256_castsi256_si128(pair[k]));
            _mm_storeu_si128((__m128i *)(void *)(first + K3_MX_GROUP), _mm256_extracti128_si256(pair[k], 1));
        }
    }
}

/* ---- cross-lane order of rule 3 ---- */

K3V_INLINE k3v_f k3v_quad2(k3v_f a, k3v_f b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
K3V_INLINE k3v_f k3v_quad1(k3v_f a, k3v_f b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

/* The first halving step (8) of a row's quad sums: vectors 0-3 hold quads 0-7, vectors 4-7 quads 8-15;
 * element v of 128-bit part q of the result is sum 2v + q. */
K3V_INLINE k3v_f k3v_quads(const k3v_f *acc) {
    return _mm256_add_ps(k3v_quad1(k3v_quad2(acc[0], acc[1]), k3v_quad2(acc[2], acc[3])),
                         k3v_quad1(k3v_quad2(acc[4], acc[5]), k3v_quad2(acc[6], acc[7])));
}

/* Finish four rows together: 4 and 2 lie inside a part, 1 across the parts. */
K3V_INLINE __m128 k3v_fold4(k3v_f a, k3v_f b, k3v_f c, k3v_f d) {
    const __m256 t = k3v_quad1(k3v_quad2(a, b), k3v_quad2(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

/* From k3v_mx_pairs' lanes: the two halves of a chunk are quads 0-7 and 8-15, so the first halving step adds them;
 * element k of 128-bit part q is then sum 4q + k. */
K3V_INLINE k3v_f k3v_mx_quads(const k3v_f *acc) { return k3v_quads(acc); }

/* Finish four rows: 4 lies across the parts, 2 and 1 inside. */
K3V_INLINE __m128 k3v_mx_fold4(const k3v_f *q) {
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(q[0], q[1], 0x20), _mm256_permute2f128_ps(q[0], q[1], 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(q[2], q[3], 0x20), _mm256_permute2f128_ps(q[2], q[3], 0x31));
    const __m256 t = k3v_quad2(ab, cd), acbd = k3v_quad1(t, t);
    return _mm_unpacklo_ps(_mm256_castps256_ps128(acbd), _mm256_extractf128_ps(acbd, 1));
}

#endif

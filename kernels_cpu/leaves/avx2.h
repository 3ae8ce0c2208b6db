/* AVX2 vector primitives for tiles.h: 8 binary32 lanes, a rule-3 row is 8 vectors.
 *
 * Vector v of a row holds lanes 8v .. 8v+7 of rule 3 in natural order, that is pairs 8v .. of a chunk. */
#ifndef K3_LEAVES_AVX2_H
#define K3_LEAVES_AVX2_H

#include <immintrin.h>

#include "mxfp4_table.h"
#include "scalar.h"

#define K3V_INLINE static inline __attribute__((always_inline))

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

/* ---- MXFP4: two vectors are one scale group ---- */

#define K3V_MX_VECTORS 2 /* vectors per scale group */

/* Row s: 8 scaled magnitudes, then 8 masks of the sign bit (0 for s = 0, whose weights are all +0). */
#define K3V_MX_SIGN(s) ((s) ? 0x80000000u : 0u)
#define K3V_MX_ROW(s)                                                                                       \
    {K3_MX_BITS(0, s), K3_MX_BITS(1, s), K3_MX_BITS(2, s), K3_MX_BITS(3, s), K3_MX_BITS(4, s),              \
     K3_MX_BITS(5, s), K3_MX_BITS(6, s), K3_MX_BITS(7, s), K3V_MX_SIGN(s),   K3V_MX_SIGN(s),                \
     K3V_MX_SIGN(s),   K3V_MX_SIGN(s),   K3V_MX_SIGN(s),   K3V_MX_SIGN(s),   K3V_MX_SIGN(s),                \
     K3V_MX_SIGN(s)}
static const uint32_t k3v_mx_rows[256][16] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_ROW)};

/* 8 packed bytes under scale byte s -> 8 odd (high nibble) and 8 even (low nibble) weights. vpermps reads 3 index
 * bits; the sign is bit 3 (7) of the byte. */
K3V_INLINE k3v_pair k3v_split_mx(const uint8_t *p, uint32_t s) {
    const __m256i table = _mm256_load_si256((const __m256i *)(const void *)k3v_mx_rows[s]);
    const __m256i sign = _mm256_load_si256((const __m256i *)(const void *)(k3v_mx_rows[s] + 8));
    const __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    const __m256i odd = _mm256_permutevar8x32_epi32(table, _mm256_srli_epi32(w, 4));
    const __m256i even = _mm256_permutevar8x32_epi32(table, w);
    k3v_pair r;
    r.odd = _mm256_castsi256_ps(_mm256_or_si256(odd, _mm256_and_si256(_mm256_slli_epi32(w, 24), sign)));
    r.even = _mm256_castsi256_ps(_mm256_or_si256(even, _mm256_and_si256(_mm256_slli_epi32(w, 28), sign)));
    return r;
}

/* 16 neighbouring binary32 in the order of k3v_split_mx, which is the natural one here. */
K3V_INLINE k3v_pair k3v_split_x_mx(const float *p) { return k3v_split_f32(p); }

/* The same weights as 16 neighbouring bf16. */
K3V_INLINE void k3v_mx_store_bf16(uint16_t *out, const uint8_t *p, uint32_t s) {
    const k3v_pair w = k3v_split_mx(p, s);
    const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(w.even), 16);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_or_si256(_mm256_castps_si256(w.odd), even));
}

/* ---- cross-lane order of rule 3 ---- */

K3V_INLINE k3v_f k3v_quad2(k3v_f a, k3v_f b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
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

K3V_INLINE k3v_f k3v_quads_mx(const k3v_f *acc) { return k3v_quads(acc); }

/* Finish four rows together: 4 and 2 lie inside a part, 1 across the parts. */
K3V_INLINE __m128 k3v_fold4(k3v_f a, k3v_f b, k3v_f c, k3v_f d) {
    const __m256 t = k3v_quad1(k3v_quad2(a, b), k3v_quad2(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

#endif

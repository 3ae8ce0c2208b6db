/* What AVX512_BF16 adds: dot products of bf16 pairs, for weights as they lie and for MXFP4.
 *
 * vdpbf16ps adds the odd product, then the even one, each with one rounding: rule 3's order (dpbf16_test.h asks the
 * CPU). MXFP4 weights come out as pairs in a lane order of their own: element d of accumulator k is pair 4d + k of its
 * chunk, so a quad's lanes lie in four accumulators and its sum needs no shuffle. x is packed into the same order. */
#ifndef K3_LEAVES_AVX512_BF16_H
#define K3_LEAVES_AVX512_BF16_H

#include "avx512.h"

K3V_INLINE k3v_f k3v_dp(k3v_f acc, __m512i w, __m512i x) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x); }

/* 32 neighbouring binary32 without low bits -> bf16, as they lie. */
K3V_INLINE __m512i k3v_pack_bf16(const float *p) {
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                          19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(p), high, _mm512_loadu_si512(p + 16));
}

/* ---- MXFP4 ----------------------------------------------------------------------------------------- */

/* Row s: the 16 codes as bf16. */
#define K3V_MX_HALF(c, s) (uint16_t)(K3V_MX_CODE(c, s) >> 16)
#define K3V_MX_HALF_ROW(s)                                                                                    \
    {K3V_MX_HALF(0, s),  K3V_MX_HALF(1, s),  K3V_MX_HALF(2, s),  K3V_MX_HALF(3, s),  K3V_MX_HALF(4, s),       \
     K3V_MX_HALF(5, s),  K3V_MX_HALF(6, s),  K3V_MX_HALF(7, s),  K3V_MX_HALF(8, s),  K3V_MX_HALF(9, s),       \
     K3V_MX_HALF(10, s), K3V_MX_HALF(11, s), K3V_MX_HALF(12, s), K3V_MX_HALF(13, s), K3V_MX_HALF(14, s),      \
     K3V_MX_HALF(15, s)}
static const uint16_t k3v_mx_half_rows[256][16] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_HALF_ROW)};

/* The table of two groups: 32 bf16. */
K3V_INLINE __m512i k3v_mx_table(const uint8_t *s) {
    const __m256i *low = (const __m256i *)(const void *)k3v_mx_half_rows[s[0]];
    const __m256i *high = (const __m256i *)(const void *)k3v_mx_half_rows[s[1]];
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256(low)), _mm256_load_si256(high), 1);
}

/* Where the nibbles of bytes k and 4 + k of a qword begin; what falls into an index's high byte does not matter. */
#define K3V_MX_SHIFT(k)                                                                                       \
    ((uint64_t)(8 * (k)) | (uint64_t)(8 * (k) + 4) << 16 | (uint64_t)(8 * (k) + 32) << 32 |                   \
     (uint64_t)((8 * (k) + 36) & 63) << 48)

/* Pairs 4d + k of 64 packed bytes, the four groups of a chunk, a dword a pair. A 128-bit part holds its own group's nibbles,
 * so one multishift serves four groups at once, where 16 bytes would have to be broadcast for each; its bits above
 * a nibble are its neighbour's and give way to the group's number, which chooses among both tables' halves. */
K3V_INLINE __m512i k3v_mx_pairs(int k, __m512i line, __m512i tables01, __m512i tables23) {
    const __m512i group = _mm512_setr_epi32(0, 0, 0, 0, 0x100010, 0x100010, 0x100010, 0x100010, 0x200020, 0x200020, 0x200020,
                                            0x200020, 0x300030, 0x300030, 0x300030, 0x300030);
    const __m512i at = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)K3V_MX_SHIFT(k)), line);
    const __m512i index = _mm512_ternarylogic_epi64(at, _mm512_set1_epi16(15), group, 0xea); /* (a & b) | c */
    return _mm512_permutex2var_epi16(tables01, index, tables23);
}

/* A chunk of x in that order: 32 bf16 for each k. */
K3V_INLINE void k3v_mx_pack_x(const float *p, uint16_t *out) {
    /* pairs k, k + 4, ..., k + 28 of two vectors, those of the second behind */
    const __m512i from = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m512i v[4];
    for (int i = 0; i < 4; i++) v[i] = k3v_pack_bf16(p + 32 * i);
    for (int k = 0; k < 4; k++) {
        const __m512i at = _mm512_add_epi32(from, _mm512_set1_epi32(k));
        const __m512i low = _mm512_permutex2var_epi32(v[0], at, v[1]), high = _mm512_permutex2var_epi32(v[2], at, v[3]);
        _mm512_store_si512(out + 32 * k, _mm512_shuffle_i64x2(low, high, 0x44));
    }
}

/* k3v_mx_chunk on packed x. */
K3V_INLINE void k3v_mx_chunk_bf16(const uint8_t *const *w, const uint8_t *const *s, uint64_t g, const uint16_t *x,
                                  k3v_f (*acc)[K3V_PER_ROW]) {
    const __m512i xv[4] = {_mm512_load_si512(x), _mm512_load_si512(x + 32), _mm512_load_si512(x + 64), _mm512_load_si512(x + 96)};
    K3V_UNROLL
    for (int r = 0; r < K3V_MX_ROWS; r++) {
        const __m512i line = _mm512_loadu_si512(w[r] + 16u * g);
        const __m512i tables01 = k3v_mx_table(s[r] + g), tables23 = k3v_mx_table(s[r] + g + 2);
        K3V_UNROLL
        for (int k = 0; k < 4; k++) acc[r][k] = k3v_dp(acc[r][k], k3v_mx_pairs(k, line, tables01, tables23), xv[k]);
    }
}

/* ---- rule 3's order from those lanes ---- */

/* The 16 quad sums of a row, in natural order: (lane 0 + lane 2) + (lane 1 + lane 3). */
K3V_INLINE k3v_f k3v_mx_quads(const k3v_f *acc) {
    return _mm512_add_ps(_mm512_add_ps(acc[0], acc[2]), _mm512_add_ps(acc[1], acc[3]));
}
/* Four rows, one a part, element d what 8 and 4 have left of quads d, d + 4, ... */
K3V_INLINE k3v_f k3v_mx_rows_bf16(k3v_f (*acc)[K3V_PER_ROW]) {
    return k3v_halve_pairs(k3v_halve_parts(k3v_mx_quads(acc[0]), k3v_mx_quads(acc[2])),
                           k3v_halve_parts(k3v_mx_quads(acc[1]), k3v_mx_quads(acc[3])));
}
K3V_INLINE __m128 k3v_mx_fold_bf16(k3v_f (*acc)[K3V_PER_ROW]) {
    const k3v_f rows = k3v_mx_rows_bf16(acc), t = k3v_quad2(rows, rows), u = k3v_quad1(t, t);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), u));
}
/* Four blocks of them: a part of the result is a row's four block sums. */
K3V_INLINE k3v_f k3v_mx_square_bf16(const k3v_f *rows) {
    return k3v_quad1(k3v_quad2(rows[0], rows[1]), k3v_quad2(rows[2], rows[3]));
}

#endif

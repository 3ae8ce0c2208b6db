/* What AVX512_BF16 adds: dot products of bf16 pairs, for weights as they lie and for MXFP4.
 *
 * vdpbf16ps adds the odd product, then the even one, each with one rounding: rule 3's order (dpbf16_test.h asks the
 * CPU). MXFP4 weights come out as pairs in a lane order of their own, 128-bit part q, element d holding pair 4d + q:
 * then one multishift of 16 broadcast bytes makes all 32 table indices. x is packed into the same order. */
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

/* Row s: dword c holds code c's bf16 twice, because an index has a bit of the next nibble at its low end. */
#define K3V_MX_PAIR(c, s) (K3V_MX_CODE(c, s) >> 16) * 0x10001u
#define K3V_MX_PAIR_ROW(s)                                                                                    \
    {K3V_MX_PAIR(0, s),  K3V_MX_PAIR(1, s),  K3V_MX_PAIR(2, s),  K3V_MX_PAIR(3, s),  K3V_MX_PAIR(4, s),       \
     K3V_MX_PAIR(5, s),  K3V_MX_PAIR(6, s),  K3V_MX_PAIR(7, s),  K3V_MX_PAIR(8, s),  K3V_MX_PAIR(9, s),       \
     K3V_MX_PAIR(10, s), K3V_MX_PAIR(11, s), K3V_MX_PAIR(12, s), K3V_MX_PAIR(13, s), K3V_MX_PAIR(14, s),      \
     K3V_MX_PAIR(15, s)}
static const uint32_t k3v_mx_pair_rows[256][16] __attribute__((aligned(64))) = {K3_MX_256(K3V_MX_PAIR_ROW)};

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
    const __m512i table = _mm512_load_si512((const void *)k3v_mx_pair_rows[s]);
    return _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(shift, bytes), table);
}

/* A chunk of x in that order, 32 bf16 a group. */
K3V_INLINE void k3v_mx_pack_x(const float *p, uint16_t *out) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (uint32_t i = 0; i < K3_CHUNK; i += K3_MX_GROUP)
        _mm512_store_si512(out + i, _mm512_permutexvar_epi32(order, k3v_pack_bf16(p + i)));
}

/* As k3v_mx_step_f32, on packed x. */
K3V_INLINE void k3v_mx_step_bf16(int part, const uint8_t *const *w, const uint8_t *const *s, uint64_t g, const uint16_t *x,
                                 k3v_f (*acc)[K3V_PER_ROW]) {
    const __m512i xv = _mm512_load_si512(x + 32 * part);
    const uint64_t group = g + (uint64_t)part;
    K3V_UNROLL
    for (int r = 0; r < K3V_MX_ROWS; r++)
        acc[r][part] = k3v_dp(acc[r][part], k3v_mx_pairs(w[r] + 16u * group, s[r][group]), xv);
}

/* ---- rule 3's order from those lanes ---- */

/* A quad's lanes lie in the four parts. Part order 0 2 1 3 of the accumulators comes out, element d of accumulator v
 * being quad 4v + d; so 8, then 4 lie across parts, 2 and 1 inside one. */
K3V_INLINE k3v_f k3v_mx_quads(const k3v_f *acc) {
    return k3v_halve_pairs(k3v_halve_parts(acc[0], acc[1]), k3v_halve_parts(acc[2], acc[3]));
}
/* Four rows, one a part, element d what 8 and 4 have left of quads d, d + 4, ... */
K3V_INLINE k3v_f k3v_mx_rows_bf16(k3v_f (*acc)[K3V_PER_ROW]) {
    return k3v_halve_parts(k3v_halve_pairs(k3v_mx_quads(acc[0]), k3v_mx_quads(acc[1])),
                           k3v_halve_pairs(k3v_mx_quads(acc[2]), k3v_mx_quads(acc[3])));
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

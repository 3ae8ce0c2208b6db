/* Weights and x in the order in which panel.h reads them. Moves and exact decoding only: no arithmetic that rounds.
 *
 * Elements that are absent, in the last chunk of a block, are w = -0 beside x = +0, which changes no accumulator. */
#ifndef K3_LEAVES_PANEL_PACK_H
#define K3_LEAVES_PANEL_PACK_H

#define K3P_AHEAD 6u /* chunks of a prefetch */

/* Dwords of 16 rows -> z[d], d < 16: dword d of rows 0 .. 15. A line of every row is read once: 16 rows lie a power of
 * two apart as often as not and share a cache set, so that 16 bytes of each at a time would find their lines gone. */
K3V_INLINE void k3p_transpose(const uint8_t *const *row, uint64_t at, __m512i *z) {
    k3v_f r[16];
    K3P_UNROLL
    for (int i = 0; i < 16; i++) r[i] = _mm512_castsi512_ps(_mm512_loadu_si512((const void *)(row[i] + at)));
    k3v_transpose(r);
    K3P_UNROLL
    for (int i = 0; i < 16; i++) z[i] = _mm512_castps_si512(r[i]);
}

/* The same of `n` < 64 bytes, then of `pad`. */
K3V_INLINE void k3p_transpose_tail(const uint8_t *const *row, uint64_t at, uint32_t n, __m512i pad, __m512i *z) {
    k3v_f r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_castsi512_ps(_mm512_mask_loadu_epi8(pad, (1ull << n) - 1u, (const void *)(row[i] + at)));
    k3v_transpose(r);
    for (int i = 0; i < 16; i++) z[i] = _mm512_castps_si512(r[i]);
}

/* `bytes` of 16 rows from `at` on, where there are as many: what the first panel of a call reads soon, which no products
 * before it could fetch (k3p_soon). */
K3V_INLINE void k3p_prefetch(const uint8_t *const *row, uint64_t at, uint64_t end, uint32_t bytes) {
    if (at >= end) return;
    for (uint32_t r = 0; r < K3P_ROWS; r++)
        for (uint32_t i = 0; i < bytes; i += 64u) K3V_PREFETCH(row[r] + at + i);
}

/* Line i of a chunk c: its 16 pairs are four quads of four lanes. */
K3V_INLINE void k3p_store_line(const __m512i *z, uint32_t i, uint32_t c, uint32_t n, uint32_t *panel) {
    K3P_UNROLL
    for (uint32_t d = 0; d < 16u; d++)
        _mm512_store_si512((void *)(panel + (uint64_t)(4u * i + d / 4u) * k3p_of_quad(n) + c * 64u + 16u * (d % 4u)), z[d]);
}

/* The panel of 16 rows of B bf16. */
static __attribute__((noinline)) void k3p_panel_bf16(const uint8_t *const *row, uint32_t B, int is_cold, uint32_t *panel) {
    const uint32_t n = (B + K3_CHUNK - 1u) / K3_CHUNK;
    __m512i z[16];
    for (uint32_t c = 0; c < n; c++) {
        if (is_cold) k3p_prefetch(row, 256u * ((uint64_t)c + K3P_AHEAD), 2u * (uint64_t)B, 256u);
        for (uint32_t i = 0; i < 4u; i++) {
            const uint32_t at = 256u * c + 64u * i;
            if (at + 64u <= 2u * B) k3p_transpose(row, at, z);
            else k3p_transpose_tail(row, at, at < 2u * B ? 2u * B - at : 0u, _mm512_set1_epi16((short)0x8000), z);
            k3p_store_line(z, i, c, n, panel);
        }
    }
}

/* ---- MXFP4 ----------------------------------------------------------------------------------------- */

/* A pair of codes becomes a pair of bf16 without the units that multiply: on a Zen 4 a multishift, a rotation or a sum that
 * saturates takes their place, and shifts by a constant, permutations and plain sums do not.
 *
 * k3p_spread puts a dword's even codes into its low word and its odd ones into its high word, so that pair l is 4 l bits up.
 * A code's sign and magnitude are looked up as of scale 1, the scale is added to the exponent, and what is no zero is kept. */
K3V_INLINE __m512i k3p_spread(__m512i z, __mmask16 is_some) {
#define K3P_BYTES(a, b, c, d) ((uint64_t)(a) | (uint64_t)(b) << 8 | (uint64_t)(c) << 16 | (uint64_t)(d) << 24)
#define K3P_TWICE(a, b, c, d) (K3P_BYTES(a, b, c, d) | K3P_BYTES((a) + 32u, (b) + 32u, (c) + 32u, (d) + 32u) << 32)
    const __m512i low = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)K3P_TWICE(0u, 16u, 4u, 20u)), z);
    const __m512i high = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)K3P_TWICE(4u, 20u, 8u, 24u)), z);
    return _mm512_maskz_ternarylogic_epi32(is_some, low, high, _mm512_set1_epi8(15), 0xe4); /* c ? a : b */
}

#define K3P_OF_ONE 0x0000, 0x0000, 0x0080, 0x00c0, 0x0100, 0x0140, 0x0180, 0x01c0
#define K3P_OF_MINUS 0x8000, 0x8000, 0x8080, 0x80c0, 0x8100, 0x8140, 0x8180, 0x81c0
#define K3P_KEPT 0x8000, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff
/* By an index of five bits: of the code, and one of the next code at its top. */
static const uint16_t k3p_values[32] __attribute__((aligned(64))) = {K3P_OF_ONE, K3P_OF_MINUS, K3P_OF_ONE, K3P_OF_MINUS};
static const uint16_t k3p_kept[32] __attribute__((aligned(64))) = {K3P_KEPT, K3P_KEPT, K3P_KEPT, K3P_KEPT};

/* Pair l of codes by k3p_spread, as bf16. */
K3V_INLINE __m512i k3p_decode(__m512i codes, uint32_t l, __m512i scale) {
    const __m512i index = l == 0u ? codes : _mm512_srli_epi16(codes, 4u * l);
    const __m512i value = _mm512_permutexvar_epi16(index, _mm512_load_si512((const void *)k3p_values));
    return _mm512_and_si512(_mm512_add_epi16(value, scale), _mm512_permutexvar_epi16(index, _mm512_load_si512((const void *)k3p_kept)));
}

/* Scale bytes of 16 rows, as [group][row]; n groups, then bytes that are nobody's, up to a multiple of 16. */
K3V_INLINE void k3p_scales(const uint8_t *const *scale, uint32_t n, uint8_t (*out)[16]) {
    const __m512i parts = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (uint32_t g = 0; g < n; g += 16u) {
        const __mmask16 here = n - g < 16u ? (__mmask16)((1u << (n - g)) - 1u) : (__mmask16)0xffffu;
        __m512i z[4];
        K3V_UNROLL
        for (int k = 0; k < 4; k++) { /* rows k, 4 + k, 8 + k, 12 + k */
            z[k] = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(here, scale[k] + g));
            z[k] = _mm512_inserti32x4(z[k], _mm_maskz_loadu_epi8(here, scale[4 + k] + g), 1);
            z[k] = _mm512_inserti32x4(z[k], _mm_maskz_loadu_epi8(here, scale[8 + k] + g), 2);
            z[k] = _mm512_inserti32x4(z[k], _mm_maskz_loadu_epi8(here, scale[12 + k] + g), 3);
        }
        const __m512i a = _mm512_unpacklo_epi8(z[0], z[1]), b = _mm512_unpacklo_epi8(z[2], z[3]);
        const __m512i c = _mm512_unpackhi_epi8(z[0], z[1]), d = _mm512_unpackhi_epi8(z[2], z[3]);
        _mm512_storeu_si512((void *)out[g], _mm512_permutexvar_epi32(parts, _mm512_unpacklo_epi16(a, b)));
        _mm512_storeu_si512((void *)out[g + 4u], _mm512_permutexvar_epi32(parts, _mm512_unpackhi_epi16(a, b)));
        _mm512_storeu_si512((void *)out[g + 8u], _mm512_permutexvar_epi32(parts, _mm512_unpacklo_epi16(c, d)));
        _mm512_storeu_si512((void *)out[g + 12u], _mm512_permutexvar_epi32(parts, _mm512_unpackhi_epi16(c, d)));
    }
}

/* Chunk c of 16 rows of G groups: z[4v + m] is dword m of position v's group. Codes that are absent are -0. */
K3V_INLINE void k3p_codes(const uint8_t *const *row, uint32_t c, uint32_t G, __m512i *z) {
    if (4u * c + 4u <= G) k3p_transpose(row, 64u * (uint64_t)c, z);
    else k3p_transpose_tail(row, 64u * (uint64_t)c, 16u * (G - 4u * c), _mm512_set1_epi8((char)0x88), z);
}

/* Scales of 16 rows to be added to exponents, for both elements of a pair; returns which are not 0. Of a group that is absent
 * any other will do. */
K3V_INLINE __mmask16 k3p_scale_of(const uint8_t (*scales)[16], uint32_t g, uint32_t G, __m512i *out) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i scale = g < G ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)scales[g])) : one;
    const __mmask16 is_some = _mm512_test_epi32_mask(scale, scale);
    const __m512i less = _mm512_slli_epi32(_mm512_maskz_sub_epi32(is_some, scale, one), 7);
    *out = _mm512_or_si512(less, _mm512_slli_epi32(less, 16));
    return is_some;
}

/* Codes and scales as the products read them that decode on their way: [4 positions][chunks][4 quads, scale][16 rows]. */
#define K3P_CODED 80u /* dwords of a group */
static __attribute__((noinline)) void k3p_panel_coded(const uint8_t *const *row, const uint8_t (*scales)[16], uint32_t G,
                                                      int is_cold, uint32_t *panel) {
    const uint32_t n = (G + 3u) / 4u;
    for (uint32_t c = 0; c < n; c++) {
        __m512i z[16];
        if (is_cold) k3p_prefetch(row, 64u * ((uint64_t)c + K3P_AHEAD), 16u * (uint64_t)G, 64u);
        k3p_codes(row, c, G, z);
        K3V_UNROLL
        for (uint32_t v = 0; v < 4u; v++) {
            __m512i scale;
            const __mmask16 is_some = k3p_scale_of(scales, 4u * c + v, G, &scale);
            uint32_t *out = panel + ((uint64_t)v * n + c) * K3P_CODED;
            K3V_UNROLL
            for (uint32_t q = 0; q < 4u; q++) _mm512_store_si512((void *)(out + 16u * q), k3p_spread(z[4u * v + q], is_some));
            _mm512_store_si512((void *)(out + 64), scale);
        }
    }
}

/* ---- x --------------------------------------------------------------------------------------------- */

/* A chunk of one token: quad after quad of position after position, ld bytes apart. */
K3V_INLINE void k3p_pack_chunk(int kind, const float *x, uint8_t *out, uint64_t ld) {
#ifdef K3_LEAVES_AVX512_BF16
    if (kind == K3P_BF16) {
        K3V_UNROLL
        for (uint32_t v = 0; v < 4u; v++) {
            const __m512i z = k3v_pack_bf16(x + 32u * v);
            uint8_t *p = out + 4u * v * ld;
            _mm_storeu_si128((__m128i *)(void *)p, _mm512_castsi512_si128(z));
            _mm_storeu_si128((__m128i *)(void *)(p + ld), _mm512_extracti32x4_epi32(z, 1));
            _mm_storeu_si128((__m128i *)(void *)(p + 2u * ld), _mm512_extracti32x4_epi32(z, 2));
            _mm_storeu_si128((__m128i *)(void *)(p + 3u * ld), _mm512_extracti32x4_epi32(z, 3));
        }
        return;
    }
#endif
    (void)kind;
    K3V_UNROLL
    for (uint32_t q = 0; q < 16u; q++) _mm256_storeu_ps((float *)(void *)(out + q * ld), _mm256_loadu_ps(x + 8u * q));
}

/* B elements of n_tok tokens, as panel.h has them. */
K3V_INLINE void k3p_pack_x(int kind, const float *const *x, uint32_t n_tok, uint32_t most, uint32_t B, uint8_t *out) {
    const uint32_t n = (B + K3_CHUNK - 1u) / K3_CHUNK, whole = B / K3_CHUNK;
    const uint64_t piece = 8u * k3p_x_bytes(kind), ld = k3p_ldx(kind, n, n_tok);
    for (uint32_t i = 0; i < k3p_n_groups(n_tok, most); i++) {
        const uint32_t t0 = k3p_begin(i, n_tok, most), T = k3p_begin(i + 1u, n_tok, most) - t0;
        uint8_t *at = out + t0 * (uint64_t)n * piece;
        for (uint32_t c = 0; c < whole; c++) /* a line's tokens one after the other */
            for (uint32_t t = 0; t < T; t++, at += piece) k3p_pack_chunk(kind, x[t0 + t] + (uint64_t)c * K3_CHUNK, at, ld);
        for (uint32_t t = 0; whole < n && t < T; t++, at += piece) {
            float tail[K3_CHUNK] = {0};
            __builtin_memcpy(tail, x[t0 + t] + (uint64_t)whole * K3_CHUNK, (B - whole * K3_CHUNK) * sizeof(float));
            k3p_pack_chunk(kind, tail, at, ld);
        }
    }
}

#endif

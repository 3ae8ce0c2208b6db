/* Weights and x in the order in which panel.h reads them. Moves and exact decoding only: no arithmetic that rounds.
 *
 * Elements that are absent, in the last chunk of a block, are w = -0 beside x = +0, which changes no accumulator. */
#ifndef K3_LEAVES_PANEL_PACK_H
#define K3_LEAVES_PANEL_PACK_H

#define K3P_AHEAD 6u /* chunks of a prefetch */

/* Four 16-byte pieces as one vector. */
K3V_INLINE __m512i k3p_pieces(const void *a, const void *b, const void *c, const void *d) {
    __m512i r = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)a));
    r = _mm512_inserti32x4(r, _mm_loadu_si128((const __m128i *)b), 1);
    r = _mm512_inserti32x4(r, _mm_loadu_si128((const __m128i *)c), 2);
    return _mm512_inserti32x4(r, _mm_loadu_si128((const __m128i *)d), 3);
}

/* Vector k of four: 16 bytes at `at` of rows k, 4 + k, 8 + k, 12 + k. */
K3V_INLINE void k3p_load_rows(const uint8_t *const *row, uint64_t at, __m512i *z) {
    K3V_UNROLL
    for (int k = 0; k < 4; k++) z[k] = k3p_pieces(row[k] + at, row[4 + k] + at, row[8 + k] + at, row[12 + k] + at);
}

/* ---- bf16 ------------------------------------------------------------------------------------------ */

/* Four pairs of 16 rows, 16 bytes at `at` of each -> out [4][16]. */
K3V_INLINE void k3p_quad_of_rows(const uint8_t *const *row, uint64_t at, uint32_t *out) {
    __m512i z[4];
    k3p_load_rows(row, at, z);
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    const __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    _mm512_store_si512((void *)out, _mm512_unpacklo_epi64(a, b));
    _mm512_store_si512((void *)(out + 16), _mm512_unpackhi_epi64(a, b));
    _mm512_store_si512((void *)(out + 32), _mm512_unpacklo_epi64(c, d));
    _mm512_store_si512((void *)(out + 48), _mm512_unpackhi_epi64(c, d));
}

/* What comes next of 16 rows: `bytes` of each from `at` on, or of the 16 rows below. */
K3V_INLINE void k3p_prefetch(const uint8_t *const *row, uint64_t at, uint64_t end, uint64_t below, uint32_t bytes) {
    const uint64_t next = at < end ? at : at - end + below;
    for (uint32_t r = 0; r < K3P_ROWS; r++)
        for (uint32_t i = 0; i < bytes; i += 64u) K3V_PREFETCH(row[r] + next + i);
}

/* The panel of 16 rows of B bf16, ld bytes apart. */
static __attribute__((noinline)) void k3p_panel_bf16(const uint8_t *const *row, uint64_t ld, uint32_t B, uint32_t *panel) {
    const uint32_t n = (B + K3_CHUNK - 1u) / K3_CHUNK, whole = B / K3_CHUNK;
    for (uint32_t c = 0; c < whole; c++) {
        k3p_prefetch(row, 256u * ((uint64_t)c + K3P_AHEAD), 256u * (uint64_t)n, 16u * ld, 256u);
        for (uint32_t q = 0; q < 16u; q++)
            k3p_quad_of_rows(row, 256u * (uint64_t)c + 16u * q, panel + ((uint64_t)q * n + c) * 64u);
    }
    if (whole < n) {
        _Alignas(64) uint16_t tail[K3P_ROWS][K3_CHUNK];
        const uint8_t *at[K3P_ROWS];
        for (uint32_t r = 0; r < K3P_ROWS; r++) {
            for (uint32_t i = 0; i < K3_CHUNK; i++) tail[r][i] = 0x8000u;
            __builtin_memcpy(tail[r], row[r] + 256u * (uint64_t)whole, 2u * (B - whole * K3_CHUNK));
            at[r] = (const uint8_t *)tail[r];
        }
        for (uint32_t q = 0; q < 16u; q++) k3p_quad_of_rows(at, 16u * q, panel + ((uint64_t)q * n + whole) * 64u);
    }
}

/* ---- MXFP4 ----------------------------------------------------------------------------------------- */

/* 16 bytes of 16 rows -> out[m], m < 4: bytes 4m .. 4m+3, each of rows 0 .. 15. */
K3V_INLINE void k3p_transpose_bytes(const uint8_t *const *row, uint64_t at, __m512i *out) {
    const __m512i parts = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i z[4];
    k3p_load_rows(row, at, z);
    const __m512i a = _mm512_unpacklo_epi8(z[0], z[1]), b = _mm512_unpacklo_epi8(z[2], z[3]);
    const __m512i c = _mm512_unpackhi_epi8(z[0], z[1]), d = _mm512_unpackhi_epi8(z[2], z[3]);
    out[0] = _mm512_permutexvar_epi32(parts, _mm512_unpacklo_epi16(a, b));
    out[1] = _mm512_permutexvar_epi32(parts, _mm512_unpackhi_epi16(a, b));
    out[2] = _mm512_permutexvar_epi32(parts, _mm512_unpacklo_epi16(c, d));
    out[3] = _mm512_permutexvar_epi32(parts, _mm512_unpackhi_epi16(c, d));
}

/* E2M1 under scale byte 127, as bf16, twice: an index of five bits has a bit of the next nibble at its top. */
#define K3P_CODES 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, \
                  0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0
static const uint16_t k3p_codes[32] __attribute__((aligned(64))) = {K3P_CODES, K3P_CODES};

/* 16 bytes (rows) at 16 * d of the vector -> two equal words a row, the second to be shifted by a nibble. */
K3V_INLINE __m512i k3p_spread(__m512i bytes, uint32_t d) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_set_epi64x(0x0f0e0d0c0b0a0908LL, 0x0706050403020100LL));
    const __m512i twice = _mm512_add_epi32(_mm512_or_si512(byte, _mm512_slli_epi32(byte, 16)), _mm512_set1_epi32((int)(d * 0x00100010u)));
    return _mm512_permutexvar_epi8(twice, bytes);
}

/* Bytes of 16 rows -> their pairs of bf16. exponent: what the rows' scales add to both words; a zero takes nothing. */
K3V_INLINE __m512i k3p_decode(__m512i bytes, uint32_t d, __m512i exponent) {
    const __m512i shift = _mm512_set1_epi64(52LL << 48 | 32LL << 32 | 20LL << 16);
    /* A quadword is two rows, a byte twice each; of an index only five bits count. */
    const __m512i index = _mm512_multishift_epi64_epi8(shift, k3p_spread(bytes, d));
    const __m512i value = _mm512_permutexvar_epi16(index, _mm512_load_si512((const void *)k3p_codes));
    return _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(value, _mm512_set1_epi16(0x7fff)), value, exponent);
}

/* Rule 4 at the low end. Scale 0: +0. Scale 1: a half is subnormal, and a zero of its sign. */
K3V_INLINE __m512i k3p_low_scales(__m512i pairs, __m512i scale) {
    const __mmask16 is_zero = _mm512_cmpeq_epi32_mask(scale, _mm512_setzero_si512());
    const __mmask16 is_one = _mm512_cmpeq_epi32_mask(scale, _mm512_set1_epi32(1));
    const __m512i magnitude = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
    const __m512i sign = _mm512_and_si512(pairs, _mm512_set1_epi16((short)0x8000));
    const __mmask32 subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x0080));
    const __m512i flushed = _mm512_mask_mov_epi16(pairs, subnormal, sign);
    return _mm512_maskz_mov_epi32((__mmask16)~is_zero, _mm512_mask_mov_epi32(pairs, is_one, flushed));
}

/* Scale bytes of 16 rows, groups from `first` on, as [group][row]; n groups. */
K3V_INLINE void k3p_scales(const uint8_t *const *scale, uint32_t n, uint8_t (*out)[16]) {
    for (uint32_t g = 0; g < n; g += 16u) {
        uint8_t tail[K3P_ROWS][16] = {{0}};
        const uint8_t *at[K3P_ROWS];
        __m512i z[4];
        for (uint32_t r = 0; r < K3P_ROWS; r++) {
            at[r] = scale[r] + g;
            if (n - g < 16u) {
                __builtin_memcpy(tail[r], scale[r] + g, n - g);
                at[r] = tail[r];
            }
        }
        k3p_transpose_bytes(at, 0, z);
        for (uint32_t m = 0; m < 4u; m++) _mm512_storeu_si512((void *)out[g + 4u * m], z[m]);
    }
}

/* A group of 16 rows, position v of a chunk -> its four quads, which lie `ld` dwords apart. */
K3V_INLINE void k3p_group_of_rows(const uint8_t *const *row, uint32_t g, const uint8_t *scales, uint32_t *out, uint64_t ld) {
    const __m512i scale = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)scales));
    const __m512i e = _mm512_slli_epi32(_mm512_sub_epi32(scale, _mm512_set1_epi32(127)), 7);
    const __m512i exponent = _mm512_mask_blend_epi16(0xaaaaaaaau, e, _mm512_slli_epi32(e, 16));
    const int is_low = _mm512_cmplt_epu32_mask(scale, _mm512_set1_epi32(2)) != 0;
    __m512i z[4];
    k3p_transpose_bytes(row, 16u * (uint64_t)g, z);
    K3V_UNROLL
    for (uint32_t q = 0; q < 4u; q++)
        K3V_UNROLL
        for (uint32_t l = 0; l < 4u; l++) {
            __m512i pairs = k3p_decode(z[q], l, exponent);
            if (is_low) pairs = k3p_low_scales(pairs, scale);
            _mm512_store_si512((void *)(out + q * ld + 16u * l), pairs);
        }
}

/* The panel of 16 rows of G groups, ld bytes apart; scales as k3p_scales leaves them. */
static __attribute__((noinline)) void k3p_panel_mxfp4(const uint8_t *const *row, uint64_t ld, const uint8_t (*scales)[16],
                                                      uint32_t G, uint32_t *panel) {
    const uint32_t n = (G + 3u) / 4u;
    for (uint32_t c = 0; c < n; c++) {
        k3p_prefetch(row, 64u * ((uint64_t)c + K3P_AHEAD), 64u * (uint64_t)n, 16u * ld, 64u);
        for (uint32_t v = 0; v < 4u; v++) {
            uint32_t *out = panel + ((uint64_t)4u * v * n + c) * 64u;
            if (4u * c + v < G) {
                k3p_group_of_rows(row, 4u * c + v, scales[4u * c + v], out, (uint64_t)n * 64u);
                continue;
            }
            for (uint32_t i = 0; i < 16u; i++)
                _mm512_store_si512((void *)(out + i / 4u * (uint64_t)n * 64u + i % 4u * 16u), _mm512_set1_epi32((int)0x80008000u));
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
K3V_INLINE void k3p_pack_x(int kind, const float *const *x, uint32_t n_tok, uint32_t B, uint8_t *out) {
    const uint32_t n = (B + K3_CHUNK - 1u) / K3_CHUNK, whole = B / K3_CHUNK;
    const uint64_t piece = 8u * k3p_x_bytes(kind), ld = (uint64_t)n_tok * n * piece;
    for (uint32_t i = 0; i < k3p_n_groups(n_tok); i++) {
        const uint32_t t0 = k3p_begin(i, n_tok), T = k3p_begin(i + 1u, n_tok) - t0;
        for (uint32_t t = 0; t < T; t++) {
            uint8_t *at = out + (t0 * (uint64_t)n + t) * piece;
            for (uint32_t c = 0; c < whole; c++) k3p_pack_chunk(kind, x[t0 + t] + (uint64_t)c * K3_CHUNK, at + (uint64_t)c * T * piece, ld);
            if (whole < n) {
                float tail[K3_CHUNK] = {0};
                __builtin_memcpy(tail, x[t0 + t] + (uint64_t)whole * K3_CHUNK, (B - whole * K3_CHUNK) * sizeof(float));
                k3p_pack_chunk(kind, tail, at + (uint64_t)whole * T * piece, ld);
            }
        }
    }
}

#endif

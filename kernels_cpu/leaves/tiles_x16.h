/* Leaves for X of bf16 values, by vdpbf16ps: two products a lane and half the bytes of x.
 *
 * The instruction adds the odd product, then the even one, each with one rounding: rule 3's order, on weights as they
 * lie in memory (dpbf16_test.h asks the CPU). x is packed once a call; rows too long for that, and the parts of
 * rows that no vector covers, go through the plain leaves, whose bits are the same. */
#ifndef K3_LEAVES_TILES_X16_H
#define K3_LEAVES_TILES_X16_H

#define K3H_MAX_K 36864u /* elements of x that are packed on the stack */

/* out: K rounded up to a chunk; absent elements +0. */
static void k3h_pack_row(const float *x, uint32_t K, uint16_t *out) {
    uint32_t i = 0;
    for (; i + 32u <= K; i += 32u) _mm512_store_si512(out + i, k3v_pack_bf16(x + i));
    for (uint32_t j = i; j < (K + 127u) / 128u * 128u; j++) out[j] = j < K ? (uint16_t)(k3_f32_to_bits(x[j]) >> 16) : 0u;
}

/* The last n < 128 weights of a row; w = -0 beside x = +0 changes nothing. */
K3V_INLINE void k3h_tail(const uint16_t *w, uint32_t n, const uint16_t *x, k3v_f *acc) {
    const __m512i none = _mm512_set1_epi16((short)0x8000);
    K3V_UNROLL
    for (uint32_t v = 0; v < 4u; v++) {
        const uint32_t here = n > 32u * v ? n - 32u * v : 0u;
        const __mmask32 mask = here >= 32u ? 0xffffffffu : (1u << here) - 1u;
        acc[v] = k3v_dp(acc[v], _mm512_mask_loadu_epi16(none, mask, w + 32u * v), _mm512_load_si512(x + 32u * v));
    }
}

/* quads of R rows side by side over K elements. */
K3V_INLINE void k3h_tile(int R, const uint16_t *const *w, const uint16_t *x, uint32_t K, k3v_ahead ahead, k3v_f *quads) {
    k3v_f acc[4][4];
    uint32_t i = 0;
    K3V_UNROLL
    for (int r = 0; r < R; r++)
        K3V_UNROLL
        for (int v = 0; v < 4; v++) acc[r][v] = k3v_zero();
    for (; i + K3_CHUNK <= K; i += K3_CHUNK) {
        const uint64_t next = 2u * (uint64_t)i < ahead.limit ? ahead.before : ahead.after;
        K3V_UNROLL
        for (uint32_t v = 0; v < 4u; v++) {
            const __m512i xv = _mm512_load_si512(x + i + 32u * v);
            K3V_UNROLL
            for (int r = 0; r < R; r++) {
                const uint16_t *p = w[r] + i + 32u * v;
                acc[r][v] = k3v_dp(acc[r][v], _mm512_loadu_si512(p), xv);
                K3V_PREFETCH((const char *)p + next);
            }
        }
    }
    if (i < K)
        K3V_UNROLL
        for (int r = 0; r < R; r++) k3h_tail(w[r] + i, K - i, x + i, acc[r]);
    K3V_UNROLL
    for (int r = 0; r < R; r++) quads[r] = k3v_quads(acc[r]);
}

static __attribute__((noinline)) void k3h_tile4(const uint16_t *const *w, const uint16_t *x, uint32_t K, k3v_ahead ahead,
                                                k3v_f *quads) {
    k3h_tile(4, w, x, K, ahead, quads);
}
static __attribute__((noinline)) void k3h_tile1(const uint16_t *const *w, const uint16_t *x, uint32_t K, k3v_ahead ahead,
                                                k3v_f *quads) {
    k3h_tile(1, w, x, K, ahead, quads);
}

/* Rows r0 .. r0 + n - 1 (n <= 4) of one token; x packed, each block on a chunk of its own. */
K3V_INLINE void k3h_rows4(const uint16_t *W, uint64_t ldw, uint32_t r0, uint32_t n, uint32_t B, uint32_t n_blocks,
                          const uint16_t *x, float *y) {
    const uint32_t room = (B + 127u) / 128u * 128u;
    __m128 d[8];
    for (uint32_t b = 0; b < n_blocks; b++) {
        const uint16_t *w[4];
        const k3v_ahead ahead = k3v_ahead_of(2u * (uint64_t)B * n_blocks, 2u * ldw, 2u * (uint64_t)b * B);
        k3v_f quads[4];
        for (uint32_t r = 0; r < 4u; r++) w[r] = W + (uint64_t)(r0 + (r < n ? r : 0u)) * ldw + (uint64_t)b * B;
        if (n == 4u) k3h_tile4(w, x + b * room, B, ahead, quads);
        else
            for (uint32_t r = 0; r < 4u; r++) k3h_tile1(w + r, x + b * room, B, ahead, quads + r);
        d[b] = k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
    }
    k3v_store_n(y, k3v_tree4(d, n_blocks), n);
}

/* A row of four or eight blocks in memory order, as k3v_row_blocks. */
K3V_INLINE float k3h_row_blocks(const uint16_t *w, uint32_t B, uint32_t n_blocks, const uint16_t *x) {
    const uint32_t room = (B + 127u) / 128u * 128u;
    const k3v_ahead ahead = {0, K3V_AHEAD_TILE, K3V_AHEAD_TILE};
    __m128 d[2];
    for (uint32_t b = 0; b < n_blocks; b += 4u) {
        k3v_f quads[4];
        for (uint32_t u = 0; u < 4u; u++) {
            const uint16_t *at[1] = {w + (uint64_t)(b + u) * B};
            k3h_tile1(at, x + (b + u) * room, B, ahead, quads + u);
        }
        d[b / 4u] = k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
    }
    return k3v_tree_across(d, n_blocks);
}

K3_LEAF void k3_rows_dot_bf16_x16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                                  uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                                  float *Y, uint64_t ldy) {
    const uint32_t B = K / n_blocks, room = (B + 127u) / 128u * 128u;
    _Alignas(64) uint16_t x[K3H_MAX_K];
    const k3p_matrix m = {(const uint8_t *)W, NULL, ldw, K, n_blocks, B, K3P_BF16};
    const k3p_result out = {Y + row0, ldy, 0};
    if (k3p_takes(&m, n_tok)) {
        k3p_rows(c, &m, row0, row1, X, ldx, NULL, n_tok, &out);
        return;
    }
    if (n_tok != 1u || room * n_blocks > K3H_MAX_K) {
        k3_rows_dot_bf16(c, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy);
        return;
    }
    for (uint32_t b = 0; b < n_blocks; b++) k3h_pack_row(X + (uint64_t)b * B, B, x + b * room);
    if (k3v_goes_by_blocks(K, n_blocks)) {
        for (uint32_t r = row0; r < row1; r++) Y[r] = k3h_row_blocks(W + (uint64_t)r * ldw, B, n_blocks, x);
        return;
    }
    for (uint32_t r = row0; r < row1; r += 4u) k3h_rows4(W, ldw, r, row1 - r < 4u ? row1 - r : 4u, B, n_blocks, x, Y + r);
}

K3_LEAF void k3_rows_dot_mxfp4_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                   uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                                   uint32_t n_tok, float *Y, uint64_t ldy) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    if (k3v_mx_panels(K3P_BF16, &m, row0, row1, X, ldx, NULL, n_tok, Y + row0, ldy, 0)) return;
    if (n_tok != 1u || m.B % K3_MX_GROUP != 0u) {
        k3_rows_dot_mxfp4(c, W, S, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy);
        return;
    }
    k3v_mx_rows_dot(K3V_X_BF16, &m, row0, row1, X, Y);
}

K3_LEAF void k3_rows_blocks_mxfp4_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                      uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    (void)c;
    k3v_mx_rows_blocks(K3V_X_BF16, &m, row0, row1, X, D);
}

K3_LEAF void k3_rows_dot_mxfp4_at_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                      uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y,
                                      uint64_t ldy) {
    const k3v_mx m = {W, S, K, 1u, K};
    (void)c;
    if (k3v_mx_panels(K3P_BF16, &m, row0, row1, X, K, at, n_tok, Y + row0, ldy, 0)) return;
    for (uint32_t t = 0; t < n_tok; t++) k3v_mx_rows_dot(K3V_X_BF16, &m, row0, row1, X + (uint64_t)at[t] * K, Y + t * ldy);
}

K3_LEAF void k3_rows_blocks_mxfp4_at_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                         uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,
                                         float *D, uint64_t ldd) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    (void)c;
    if (k3v_mx_panels(K3P_BF16, &m, row0, row1, X, K, at, n_tok, D, ldd, 1)) return;
    for (uint32_t t = 0; t < n_tok; t++)
        k3v_mx_rows_blocks(K3V_X_BF16, &m, row0, row1, X + (uint64_t)at[t] * K, D + t * ldd);
}

#endif

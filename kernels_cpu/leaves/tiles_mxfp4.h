/* MXFP4 leaves.
 *
 * Two ways, same bits. Blocks that are whole scale groups, one token: decode in registers, by a row of a table
 * of scaled values per group. Otherwise (several tokens, or blocks that begin inside a group): decode four
 * rows to bf16 once and run the bf16 tiles. A product of E2M1 and a power of two has two significant bits, so
 * bf16 holds it exactly, and one that underflows is a zero of the right sign either way. */
#ifndef K3_LEAVES_TILES_MXFP4_H
#define K3_LEAVES_TILES_MXFP4_H

#define K3V_MX_DECODED 4096u /* longest row that is decoded to the stack */

/* Group g, at position p of its chunk: all rows against one stretch of x. */
K3V_INLINE void k3v_mx_group(int R, uint32_t g, int p, const uint8_t *const *w, const uint8_t *const *s,
                             const float *x, k3v_f (*acc)[K3V_PER_ROW]) {
    k3v_pair xv[K3V_MX_VECTORS];
    K3V_UNROLL
    for (int k = 0; k < K3V_MX_VECTORS; k++) xv[k] = k3v_split_x_mx(x + K3_MX_GROUP * (uint64_t)g + k * K3V_STEP);
    K3V_UNROLL
    for (int r = 0; r < R; r++) {
        const uint32_t scale = s[r][g];
        K3V_UNROLL
        for (int k = 0; k < K3V_MX_VECTORS; k++) {
            const int v = p * K3V_MX_VECTORS + k;
            const k3v_pair wv = k3v_split_mx(w[r] + 16u * (uint64_t)g + k * K3V_LANES, scale);
            acc[r][v] = k3v_pair_fma(wv, xv[k], acc[r][v]);
        }
    }
}

/* quads[r] = the quad sums of rule 3 over G scale groups of row r. */
K3V_INLINE void k3v_mx_tile(int R, const uint8_t *const *w, const uint8_t *const *s, const float *x, uint32_t G,
                            k3v_ahead ahead, k3v_f *quads) {
    k3v_f acc[4][K3V_PER_ROW];
    uint32_t g = 0;
    K3V_UNROLL
    for (int r = 0; r < R; r++)
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) acc[r][v] = k3v_zero();
    for (; g + 4u <= G; g += 4u) {
        const uint64_t at = 16u * (uint64_t)g, next = at + (at < ahead.limit ? ahead.before : ahead.after);
        K3V_UNROLL
        for (int r = 0; r < R; r++) K3V_PREFETCH(w[r] + next);
        K3V_UNROLL
        for (int p = 0; p < 4; p++) k3v_mx_group(R, g + (uint32_t)p, p, w, s, x, acc);
    }
    K3V_UNROLL
    for (int p = 0; p < 3; p++)
        if (g + (uint32_t)p < G) k3v_mx_group(R, g + (uint32_t)p, p, w, s, x, acc);
    K3V_UNROLL
    for (int r = 0; r < R; r++) quads[r] = k3v_quads_mx(acc[r]);
}

#define K3V_MX_TILE(name, R)                                                                                  \
    static __attribute__((noinline)) void name(const uint8_t *const *w, const uint8_t *const *s, const float *x, \
                                               uint32_t G, k3v_ahead ahead, k3v_f *quads) {                   \
        k3v_mx_tile(R, w, s, x, G, ahead, quads);                                                             \
    }
K3V_MX_TILE(k3v_mx_tile_rows, K3V_ROWS)
#if K3V_ROWS > 1
K3V_MX_TILE(k3v_mx_tile_row, 1)
#else
#define k3v_mx_tile_row k3v_mx_tile_rows
#endif

typedef struct {
    const uint8_t *W, *S;
    uint32_t K, n_blocks, B; /* B = K / n_blocks */
} k3v_mx;

/* Block b of rows r0 .. r0 + n - 1 (n <= 4), groups not cut by blocks. */
K3V_INLINE __m128 k3v_mx_four(const k3v_mx *m, uint32_t r0, uint32_t n, uint32_t b, const float *x) {
    const uint8_t *w[4], *s[4];
    k3v_f quads[4];
    const uint32_t G = m->B / K3_MX_GROUP;
    const k3v_ahead ahead = k3v_ahead_of(m->K / 2u, m->K / 2u, (uint64_t)b * (m->B / 2u));
    uint32_t r;
    for (r = 0; r < 4u; r++) {
        const uint64_t row = r0 + (r < n ? r : 0u);
        w[r] = m->W + row * (m->K / 2u) + (uint64_t)b * (m->B / 2u);
        s[r] = m->S + row * (m->K / K3_MX_GROUP) + (uint64_t)b * G;
    }
    if (n == 4u) {
        for (r = 0; r < 4u; r += K3V_ROWS) k3v_mx_tile_rows(w + r, s + r, x, G, ahead, quads + r);
    } else {
        for (r = 0; r < n; r++) k3v_mx_tile_row(w + r, s + r, x, G, ahead, quads + r);
        for (; r < 4u; r++) quads[r] = quads[0];
    }
    return k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
}

/* Row r as bf16. */
K3V_INLINE void k3v_mx_decode(const k3v_mx *m, uint32_t r, uint16_t *out) {
    const uint8_t *w = m->W + (uint64_t)r * (m->K / 2u), *s = m->S + (uint64_t)r * (m->K / K3_MX_GROUP);
    for (uint32_t g = 0; g < m->K / K3_MX_GROUP; g++) {
        for (int k = 0; k < K3V_MX_VECTORS; k++)
            k3v_mx_store_bf16(out + K3_MX_GROUP * g + k * K3V_STEP, w + 16u * g + k * K3V_LANES, s[g]);
    }
}

/* Rows r0 .. of one token, into d[b]; rows that do not exist repeat the first. */
K3V_INLINE void k3v_mx_blocks(const k3v_mx *m, uint32_t r0, uint32_t n, const float *x, __m128 *d) {
    uint32_t b, r;
    if (m->B % K3_MX_GROUP == 0u) {
        for (b = 0; b < m->n_blocks; b++) d[b] = k3v_mx_four(m, r0, n, b, x + (uint64_t)b * m->B);
        return;
    }
    for (b = 0; b < m->n_blocks; b++) { /* blocks inside groups: small models only */
        float four[4] = {0};
        for (r = 0; r < n; r++)
            four[r] = k3_scalar_dot_mxfp4(m->W + (uint64_t)(r0 + r) * (m->K / 2u),
                                          m->S + (uint64_t)(r0 + r) * (m->K / K3_MX_GROUP), b * m->B,
                                          x + (uint64_t)b * m->B, m->B);
        d[b] = _mm_loadu_ps(four);
    }
}

static __attribute__((unused, noinline)) void k3v_mx_decoded(const k3v_mx *m, uint32_t r0, uint32_t n,
                                                            const float *X, uint64_t ldx, uint32_t n_tok, float *Y,
                                                            uint64_t ldy) {
    _Alignas(64) uint16_t rows[4 * K3V_MX_DECODED];
    for (uint32_t r = 0; r < n; r++) k3v_mx_decode(m, r0 + r, rows + (uint64_t)r * m->K);
    k3v_rows(K3V_BF16, (const uint8_t *)rows, m->K, 0, n, m->K, m->n_blocks, X, ldx, n_tok, Y, ldy);
}

K3_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    const int decode = K <= K3V_MX_DECODED && (n_tok > 1u || m.B % K3_MX_GROUP != 0u);
    (void)c;
    for (uint32_t r = row0; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        if (decode) {
            k3v_mx_decoded(&m, r, n, X, ldx, n_tok, Y + r, ldy);
            continue;
        }
        for (uint32_t t = 0; t < n_tok; t++) {
            __m128 d[8];
            k3v_mx_blocks(&m, r, n, X + t * ldx, d);
            k3v_store_n(Y + t * ldy + r, k3v_tree4(d, n_blocks), n);
        }
    }
}

K3_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    (void)c;
    for (uint32_t r = row0; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        __m128 d[8];
        k3v_mx_blocks(&m, r, n, X, d);
        for (uint32_t b = 0; b < n_blocks; b++) {
            float four[4];
            _mm_storeu_ps(four, d[b]);
            for (uint32_t i = 0; i < n; i++) D[(uint64_t)(r - row0 + i) * n_blocks + b] = four[i];
        }
    }
}

#endif

/* Rows times tokens by panels: bf16 and MXFP4 weights, rule 5's blocks, picked tokens. See panel.h. */
#ifndef K3_LEAVES_PANEL_ROWS_H
#define K3_LEAVES_PANEL_ROWS_H

#define K3P_LEAST_TOKENS 4u

/* Rows of a matrix, bf16 (S 0, ldw elements apart) or MXFP4. */
typedef struct {
    const uint8_t *W, *S;
    uint64_t ldw;
    uint32_t K, n_blocks, B;
    int kind; /* of x */
} k3p_matrix;

/* Where results go: y[t * ldy + row] with rule 5's tree, or D[t * ldd + row * n_blocks + block]; row 0 is the first asked for. */
typedef struct {
    float *y;
    uint64_t ld;
    int is_blocks;
} k3p_result;

K3V_INLINE int k3p_takes(const k3p_matrix *m, uint32_t n_tok) {
    return n_tok >= K3P_LEAST_TOKENS && m->B <= K3P_CHUNKS * K3_CHUNK && (m->S == NULL || m->B % K3_MX_GROUP == 0u);
}

K3V_INLINE uint64_t k3p_block_bytes(const k3p_matrix *m) { /* of one token's packed block */
    return (m->B + K3_CHUNK - 1u) / K3_CHUNK * K3_CHUNK * k3p_x_bytes(m->kind);
}

/* Block b of rows r .. r + 15 (rows that do not exist repeat the last) into y. */
K3V_INLINE void k3p_rows16(const k3p_matrix *m, uint32_t r, uint32_t row1, uint32_t b, const uint8_t *x, uint32_t n_tok,
                           float *y, uint64_t ldy, k3p_work *s) {
    static const uint8_t order[4] = {0, 2, 1, 3};
    const uint32_t n = (m->B + K3_CHUNK - 1u) / K3_CHUNK, G = m->B / K3_MX_GROUP;
    const uint8_t *w[K3P_ROWS], *scale[K3P_ROWS];
    for (uint32_t i = 0; i < K3P_ROWS; i++) {
        const uint64_t row = r + i < row1 ? r + i : row1 - 1u;
        if (m->S == NULL) {
            w[i] = m->W + (row * m->ldw + (uint64_t)b * m->B) * 2u;
        } else {
            w[i] = m->W + row * (m->K / 2u) + (uint64_t)b * (m->B / 2u);
            scale[i] = m->S + row * (m->K / K3_MX_GROUP) + (uint64_t)b * G;
        }
    }
    if (m->S == NULL) {
        k3p_panel_bf16(w, m->ldw * 2u, m->B, s->panel);
    } else {
        k3p_scales(scale, G, s->scales);
        k3p_panel_mxfp4(w, m->K / 2u, (const uint8_t(*)[16])s->scales, G, s->panel);
    }
    for (int step = 0; step < 4; step++) k3p_position(m->kind, order[step], step, n, x, n_tok, s);
    k3p_finish(n_tok, s, y, ldy);
}

K3V_INLINE k3v_f k3p_tree(const k3p_work *s, uint32_t t, uint32_t i, uint32_t nb) {
    k3v_f d[8];
    for (uint32_t b = 0; b < nb; b++) d[b] = k3v_load(&s->d[b][t][i]);
    for (uint32_t n = nb; n > 1u; n /= 2u)
        for (uint32_t b = 0; b < n / 2u; b++) d[b] = k3v_add(d[2u * b], d[2u * b + 1u]);
    return d[0];
}

K3V_INLINE void k3p_store_trees(const k3p_work *s, uint32_t n_tok, uint32_t n_rows, uint32_t nb, float *y, uint64_t ldy) {
    for (uint32_t i = 0; i < n_rows; i += K3P_ROWS) {
        const __mmask16 here = n_rows - i < K3P_ROWS ? (__mmask16)((1u << (n_rows - i)) - 1u) : (__mmask16)0xffffu;
        for (uint32_t t = 0; t < n_tok; t++) _mm512_mask_storeu_ps(y + t * ldy + i, here, k3p_tree(s, t, i, nb));
    }
}

/* Up to K3P_BATCH tokens. Where the packed x of all blocks is too much, block after block is packed for each tile. */
K3V_INLINE void k3p_batch(const k3p_matrix *m, uint32_t row0, uint32_t row1, const float *const *x, uint32_t n_tok,
                          const k3p_result *out, k3p_work *s) {
    const uint64_t of_block = k3p_block_bytes(m) * n_tok;
    const int is_all = of_block * m->n_blocks <= K3P_X_BYTES;
    for (uint32_t r = row0; r < row1; r += K3P_TILE) {
        const uint32_t n_rows = row1 - r < K3P_TILE ? row1 - r : K3P_TILE;
        for (uint32_t b = 0; b < m->n_blocks; b++) {
            uint8_t *packed = s->x + (is_all ? b * of_block : 0u);
            if (!is_all || r == row0) {
                const float *at[K3P_BATCH];
                for (uint32_t t = 0; t < n_tok; t++) at[t] = x[t] + (uint64_t)b * m->B;
                k3p_pack_x(m->kind, at, n_tok, m->B, packed);
            }
            for (uint32_t i = 0; i < n_rows; i += K3P_ROWS) k3p_rows16(m, r + i, row1, b, packed, n_tok, &s->d[b][0][i], K3P_TILE, s);
        }
        if (out->is_blocks) k3v_store_blocks(s->d[0][0], K3P_BATCH * K3P_TILE, K3P_TILE, n_tok, n_rows, m->n_blocks, out->y + (uint64_t)(r - row0) * m->n_blocks, out->ld);
        else k3p_store_trees(s, n_tok, n_rows, m->n_blocks, out->y + (r - row0), out->ld);
    }
}

/* Token t is row at[t] of X, or row t. */
static __attribute__((noinline)) void k3p_rows(const k3p_matrix *m, uint32_t row0, uint32_t row1, const float *X, uint64_t ldx,
                                               const uint32_t *at, uint32_t n_tok, const k3p_result *out) {
    const uint64_t fit = K3P_X_BYTES / k3p_block_bytes(m);
    const uint32_t most = fit < K3P_BATCH ? (uint32_t)fit : K3P_BATCH, n = (n_tok + most - 1u) / most;
    k3p_work s;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t t0 = (uint32_t)((uint64_t)i * n_tok / n), t1 = (uint32_t)((uint64_t)(i + 1u) * n_tok / n);
        const k3p_result here = {out->y + t0 * out->ld, out->ld, out->is_blocks};
        const float *x[K3P_BATCH];
        for (uint32_t t = t0; t < t1; t++) x[t - t0] = X + (at != NULL ? at[t] : t) * ldx;
        k3p_batch(m, row0, row1, x, t1 - t0, &here, &s);
    }
}

#endif

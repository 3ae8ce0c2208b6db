/* Rows times tokens by panels: bf16 and MXFP4 weights, rule 5's blocks, picked tokens. See panel.h. */
#ifndef K3_LEAVES_PANEL_ROWS_H
#define K3_LEAVES_PANEL_ROWS_H

#include "k3.h"

#define K3P_LEAST_TOKENS 4u
#define K3P_LEAST_ONCE 2u

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

/* Whether a lane has one pair of codes: panel_once.h. */
K3V_INLINE int k3p_is_once(const k3p_matrix *m) { return m->S != NULL && m->B <= K3_CHUNK; }

/* Whether a quad's pairs stay in registers: panel_held.h. */
K3V_INLINE int k3p_is_held(const k3p_matrix *m) { return m->kind == K3P_BF16 && m->S == NULL && m->B <= K3P_HELD * K3_CHUNK; }

K3V_INLINE int k3p_takes(const k3p_matrix *m, uint32_t n_tok) {
    return n_tok >= (k3p_is_once(m) ? K3P_LEAST_ONCE : K3P_LEAST_TOKENS) && m->B <= K3P_CHUNKS * K3_CHUNK && (m->S == NULL || m->B % K3_MX_GROUP == 0u);
}

K3V_INLINE uint64_t k3p_block_bytes(const k3p_matrix *m, uint32_t n_tok) { /* of its packed x */
    return 16u * k3p_ldx(m->kind, (m->B + K3_CHUNK - 1u) / K3_CHUNK, n_tok);
}

/* Tokens of a group of packed x, at most. */
K3V_INLINE uint32_t k3p_most(const k3p_matrix *m) { return k3p_is_once(m) || k3p_is_held(m) ? K3P_BATCH : m->S != NULL ? K3P_FEW : K3P_TOKENS; }

/* Packed x, and of what: the next slice of the instruction finds it, and so does another product of the slice. Slices are short
 * beside a chunk of x, which each would read and write anew from the last-level cache. */
typedef struct {
    uint64_t serial; /* 0: of nothing that may be met again */
    const float *x;
    uint64_t ldx;
    uint32_t n_tok;
    k3p_matrix m; /* the shape that is asked for */
    _Alignas(64) uint8_t bytes[K3P_X_BYTES];
} k3p_packed;
static _Thread_local k3p_packed k3p_x_kept;

/* Whether k3p_x_kept holds x of m for n_tok tokens; else it is to hold that, under the instruction's serial where c knows x as its
 * operand. */
K3V_INLINE int k3p_is_kept(const K3Ctx *c, const k3p_matrix *m, const float *x, uint64_t ldx, uint32_t n_tok) {
    const uint64_t serial = c != NULL && c->same_x == x ? c->serial : 0u;
    k3p_packed *p = &k3p_x_kept;
    if (serial != 0u && p->serial == serial && p->x == x && p->ldx == ldx && p->n_tok == n_tok && p->m.K == m->K &&
        p->m.n_blocks == m->n_blocks && p->m.kind == m->kind && (p->m.S == NULL) == (m->S == NULL))
        return 1;
    p->serial = serial;
    p->x = x;
    p->ldx = ldx;
    p->n_tok = n_tok;
    p->m = *m;
    return 0;
}

/* Where 16 rows' block b lies. */
typedef struct {
    uint32_t r, b;
} k3p_place;

K3V_INLINE const uint8_t *k3p_weights(const k3p_matrix *m, uint64_t row, uint32_t b) {
    return m->S == NULL ? m->W + (row * m->ldw + (uint64_t)b * m->B) * 2u : m->W + (row * m->K + (uint64_t)b * m->B) / 2u;
}
K3V_INLINE const uint8_t *k3p_scale_bytes(const k3p_matrix *m, uint64_t row, uint32_t b) {
    return m->S == NULL ? NULL : m->S + (row * m->K + (uint64_t)b * m->B) / K3_MX_GROUP;
}

/* What is read after `next`'s place is reached: its rows, or what follows the last ones. */
K3V_INLINE k3p_soon k3p_soon_at(const k3p_matrix *m, k3p_place next, uint32_t row1, uint32_t bytes, const k3p_work *s) {
    const int is_behind = next.r >= row1;
    k3p_soon soon = {s->behind.w, s->behind.s, m->S == NULL ? 2u * m->ldw : m->K / 2u, m->S == NULL ? 0u : m->K / K3_MX_GROUP,
                     (bytes + 63u) / 64u, 0, is_behind && s->behind.w == NULL ? K3P_ROWS : 0u};
    if (!is_behind) {
        soon.row = k3p_weights(m, next.r, next.b);
        soon.scale = k3p_scale_bytes(m, next.r, next.b);
    }
    return soon;
}

/* The panel of 16 rows (rows that do not exist repeat the last). */
K3V_INLINE void k3p_panel(const k3p_matrix *m, k3p_place at, uint32_t row1, int is_cold, k3p_work *s) {
    const uint32_t G = m->B / K3_MX_GROUP;
    const uint8_t *w[K3P_ROWS], *scale[K3P_ROWS];
    for (uint32_t i = 0; i < K3P_ROWS; i++) {
        const uint64_t row = at.r + i < row1 ? at.r + i : row1 - 1u;
        w[i] = k3p_weights(m, row, at.b);
        scale[i] = k3p_scale_bytes(m, row, at.b);
    }
    if (m->S == NULL) {
        k3p_panel_bf16(w, m->B, is_cold, s->panel);
        return;
    }
    k3p_scales(scale, G, s->scales);
    k3p_panel_coded(w, (const uint8_t(*)[16])s->scales, G, is_cold, s->panel);
}

/* Which of n rows are in a vector of 16. */
K3V_INLINE __mmask16 k3p_here(uint32_t n) { return n < K3P_ROWS ? (__mmask16)((1u << n) - 1u) : (__mmask16)0xffffu; }

/* Block b of rows r .. r + 15, or of those that are here, into y; meanwhile what comes next is fetched. */
K3V_INLINE void k3p_rows16(const k3p_matrix *m, k3p_place at, k3p_place next, uint32_t row1, int is_cold, const uint8_t *x,
                           uint32_t n_tok, float *y, uint64_t ldy, __mmask16 here, k3p_work *s) {
    static const uint8_t order[4] = {0, 2, 1, 3};
    const uint32_t n = (m->B + K3_CHUNK - 1u) / K3_CHUNK;
    k3p_soon soon = k3p_soon_at(m, next, row1, m->S == NULL ? 2u * m->B : m->B / 2u, s);
    k3p_panel(m, at, row1, is_cold, s);
    if (k3p_is_held(m)) {
        if (n == 1u) k3p_held_1(s->panel, x, n_tok, &soon, s->first);
        else k3p_held_2(s->panel, x, n_tok, &soon, s->first);
        k3p_finish(n_tok, s, y, ldy, here);
        return;
    }
    for (int step = 0; step < 4; step++)
        (m->S != NULL ? k3p_coded_position : k3p_position)(m->kind, order[step], step, n, x, n_tok, &soon, s);
    k3p_finish(n_tok, s, y, ldy, here);
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
        const __mmask16 here = k3p_here(n_rows - i);
        for (uint32_t t = 0; t < n_tok; t++) _mm512_mask_storeu_ps(y + t * ldy + i, here, k3p_tree(s, t, i, nb));
    }
}

/* Sums of 16 rows that lie by block, eight of them `ldb` floats apart, to D, where a row's blocks lie together. */
K3V_INLINE void k3p_store_eight(const float *sums, uint64_t ldb, float *D) {
    k3v_f d[8], z[8];
    K3V_UNROLL
    for (uint32_t b = 0; b < 8u; b++) d[b] = k3v_load(sums + b * ldb);
    K3V_UNROLL
    for (int b = 0; b < 8; b += 4)
        K3V_UNROLL
        for (int j = 0; j < 2; j++) { /* blocks b .. b + 3 of row 4 p + k in part p of z[b + k] */
            const __m512d low = _mm512_castps_pd(j == 0 ? _mm512_unpacklo_ps(d[b], d[b + 1]) : _mm512_unpackhi_ps(d[b], d[b + 1]));
            const __m512d high = _mm512_castps_pd(j == 0 ? _mm512_unpacklo_ps(d[b + 2], d[b + 3]) : _mm512_unpackhi_ps(d[b + 2], d[b + 3]));
            z[b + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            z[b + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    K3V_UNROLL
    for (uint32_t k = 0; k < 4u; k++) { /* rows k and 8 + k, 4 + k and 12 + k: both parts of one are neighbours then */
        const __m512i of = _mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7);
        const __m512i even = _mm512_castps_si512(_mm512_shuffle_f32x4(z[k], z[k + 4u], 0x88));
        const __m512i odd = _mm512_castps_si512(_mm512_shuffle_f32x4(z[k], z[k + 4u], 0xdd));
        const k3v_f low = _mm512_castsi512_ps(_mm512_permutexvar_epi64(of, even)), high = _mm512_castsi512_ps(_mm512_permutexvar_epi64(of, odd));
        _mm256_storeu_ps(D + 8u * k, _mm512_castps512_ps256(low));
        _mm256_storeu_ps(D + 8u * (k + 8u), _mm512_extractf32x8_ps(low, 1));
        _mm256_storeu_ps(D + 8u * (k + 4u), _mm512_castps512_ps256(high));
        _mm256_storeu_ps(D + 8u * (k + 12u), _mm512_extractf32x8_ps(high, 1));
    }
}

/* k3v_store_blocks of a tile; what is not 16 rows of eight blocks goes by fours. */
K3V_INLINE void k3p_store_blocks(const k3p_work *s, uint32_t n_tok, uint32_t n_rows, uint32_t nb, float *D, uint64_t ldd) {
    const uint32_t whole = nb == 8u ? n_rows / K3P_ROWS * K3P_ROWS : 0u;
    for (uint32_t t = 0; t < n_tok; t++)
        for (uint32_t i = 0; i < whole; i += K3P_ROWS) k3p_store_eight(&s->d[0][t][i], K3P_BATCH * K3P_TILE, D + t * ldd + 8u * i);
    k3v_store_blocks(s->d[0][0] + whole, K3P_BATCH * K3P_TILE, K3P_TILE, n_tok, n_rows - whole, nb, D + (uint64_t)whole * nb, ldd);
}

/* All blocks of rows r .. r + 15, each of one chunk, into s->d from row i of the tile on; x: of block 0. */
K3V_INLINE void k3p_rows16_once(const k3p_matrix *m, uint32_t r, uint32_t row1, int is_cold, uint32_t n_tok, uint32_t i, k3p_work *s) {
    const uint32_t G = m->B / K3_MX_GROUP;
    const uint8_t *w[K3P_ROWS], *scale[K3P_ROWS];
    const k3p_place next = {r + K3P_ROWS, 0};
    k3p_soon soon = k3p_soon_at(m, next, row1, m->K / 2u, s);
    for (uint32_t k = 0; k < K3P_ROWS; k++) {
        const uint64_t row = r + k < row1 ? r + k : row1 - 1u;
        w[k] = k3p_weights(m, row, 0u);
        scale[k] = k3p_scale_bytes(m, row, 0u);
    }
    k3p_scales(scale, G * m->n_blocks, s->scales);
    for (uint32_t b = 0; b < m->n_blocks; b++) {
        k3p_panel_coded(w, (const uint8_t(*)[16])s->scales[b * G], G, is_cold, s->panel);
        for (uint32_t k = 0; k < K3P_ROWS; k++) w[k] += m->B / 2u;
        k3p_fetch(&soon, (K3P_ROWS * soon.lines + m->n_blocks - 1u) / m->n_blocks);
        k3p_once_by_kind[m->kind](s->panel, k3p_x_kept.bytes + (uint64_t)b * K3_CHUNK * k3p_x_bytes(m->kind),
                                  k3p_once_ldx(m->kind, m->n_blocks), n_tok, &s->d[b][0][i], K3P_TILE, s->first);
    }
}

/* What comes behind: the next rows of a tile, its next block, the next tile; at the end row1. */
K3V_INLINE k3p_place k3p_next(const k3p_matrix *m, k3p_place at, uint32_t tile, uint32_t row1) {
    const uint32_t end = row1 - tile < K3P_TILE ? row1 : tile + K3P_TILE;
    const k3p_place rows = {at.r + K3P_ROWS, at.b}, block = {tile, at.b + 1u}, below = {end, 0u};
    return rows.r < end ? rows : block.b < m->n_blocks ? block : below;
}

/* Up to K3P_BATCH tokens, whose x is packed already or not. Where the packed x of all blocks is too much, block after block is packed for each tile. */
K3V_INLINE void k3p_batch(const k3p_matrix *m, uint32_t row0, uint32_t row1, const float *const *x, uint32_t n_tok,
                          int is_packed, const k3p_result *out, k3p_work *s) {
    const uint64_t of_block = k3p_block_bytes(m, n_tok);
    const int is_cold = k3p_weights(m, row0, 0u) != k3p_fetched;
    const int is_all = of_block * m->n_blocks <= K3P_X_BYTES, is_once = is_all && k3p_is_once(m), is_direct = m->n_blocks == 1u && !is_once;
    if (is_once && !is_packed) k3p_once_pack(m->kind, x, n_tok, m->n_blocks, m->B, k3p_x_kept.bytes);
    for (uint32_t r = row0; r < row1; r += K3P_TILE) {
        const uint32_t n_rows = row1 - r < K3P_TILE ? row1 - r : K3P_TILE;
        for (uint32_t b = 0; b < m->n_blocks; b++) {
            uint8_t *packed = k3p_x_kept.bytes + (is_all ? b * of_block : 0u);
            if (!is_once && (!is_all || (r == row0 && !is_packed))) {
                const float *from[K3P_BATCH];
                for (uint32_t t = 0; t < n_tok; t++) from[t] = x[t] + (uint64_t)b * m->B;
                k3p_pack_x(m->kind, from, n_tok, k3p_most(m), m->B, packed);
            }
            for (uint32_t i = 0; i < n_rows && !is_once; i += K3P_ROWS) {
                const k3p_place at = {r + i, b};
                k3p_rows16(m, at, k3p_next(m, at, r, row1), row1, is_cold && r + i == row0 && b == 0u, packed, n_tok,
                           is_direct ? out->y + (r - row0) + i : &s->d[b][0][i], is_direct ? out->ld : K3P_TILE,
                           is_direct ? k3p_here(n_rows - i) : (__mmask16)0xffffu, s);
            }
        }
        for (uint32_t i = 0; i < n_rows && is_once; i += K3P_ROWS) k3p_rows16_once(m, r + i, row1, is_cold && r + i == row0, n_tok, i, s);
        if (is_direct) continue;
        if (out->is_blocks) k3p_store_blocks(s, n_tok, n_rows, m->n_blocks, out->y + (uint64_t)(r - row0) * m->n_blocks, out->ld);
        else k3p_store_trees(s, n_tok, n_rows, m->n_blocks, out->y + (r - row0), out->ld);
    }
}

/* Token t is row at[t] of X, or row t. */
static __attribute__((noinline)) void k3p_rows(const K3Ctx *c, const k3p_matrix *m, uint32_t row0, uint32_t row1, const float *X, uint64_t ldx,
                                               const uint32_t *at, uint32_t n_tok, const k3p_result *out) {
    const uint64_t none = k3p_block_bytes(m, 0u), fit = (K3P_X_BYTES - none) / (k3p_block_bytes(m, 1u) - none);
    const uint32_t most = fit < K3P_BATCH ? (uint32_t)fit : K3P_BATCH, n = (n_tok + most - 1u) / most;
    const k3v_rows_at soon = m->S != NULL ? k3v_take_soon() : (k3v_rows_at){0, 0};
    k3p_work s;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t t0 = (uint32_t)((uint64_t)i * n_tok / n), t1 = (uint32_t)((uint64_t)(i + 1u) * n_tok / n);
        const k3p_result here = {out->y + t0 * out->ld, out->ld, out->is_blocks};
        const float *x[K3P_BATCH];
        s.behind = i + 1u < n ? (k3v_rows_at){0, 0} : soon;
        for (uint32_t t = t0; t < t1; t++) x[t - t0] = X + (at != NULL ? at[t] : t) * ldx;
        const int is_packed = k3p_is_kept(n == 1u && at == NULL ? c : NULL, m, X, ldx, n_tok);
        k3p_batch(m, row0, row1, x, t1 - t0, is_packed, &here, &s);
    }
    k3p_fetched = soon.w;
}

#endif

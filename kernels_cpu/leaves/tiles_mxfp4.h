/* MXFP4 leaves.
 *
 * Two ways, same bits. One token: decode in registers, by a row of a table of scaled values per group, against x that
 * was split into the decoder's order once a call. Otherwise (several tokens, or blocks that begin inside a group):
 * decode a block of rows to bf16 once and run the bf16 tiles. A product of E2M1 and a power of two has two significant
 * bits, so bf16 holds it exactly, and one that underflows is a zero of the right sign either way.
 *
 * Four rows lie side by side in memory and are walked together, so the bytes that come next are those of the next
 * tile: every line is prefetched once, a tile or two ahead. */
#ifndef K3_LEAVES_TILES_MXFP4_H
#define K3_LEAVES_TILES_MXFP4_H

#define K3V_MX_DECODED 4096u /* longest row that is decoded to the stack */
#define K3V_MX_SPLIT 16384u  /* longest row, blocks padded to chunks, of which x is split to the stack */
#define K3V_MX_AHEAD 8192u   /* least distance of a prefetch, in bytes */
#define K3V_MX_CHUNK_BYTES (K3_CHUNK / 2u)
#define K3V_MX_CHUNK_GROUPS (K3_CHUNK / K3_MX_GROUP)

enum { K3V_X_F32 = 0, K3V_X_BF16 = 1 }; /* what x is split into */

typedef struct {
    const uint8_t *W, *S;
    uint32_t K, n_blocks, B; /* B = K / n_blocks */
} k3v_mx;

K3V_INLINE uint32_t k3v_mx_room(uint32_t B) { return (B + K3_CHUNK - 1u) / K3_CHUNK * K3_CHUNK; }
K3V_INLINE uint64_t k3v_x_bytes(int mode) { return mode == K3V_X_F32 ? 4u : 2u; }

/* The primitives of the leaf set for either kind of x. */
K3V_INLINE void k3v_split_chunk(int mode, const float *x, uint8_t *out) {
#ifdef K3_LEAVES_AVX512_BF16
    if (mode == K3V_X_BF16) {
        k3v_mx_pack_x(x, (uint16_t *)(void *)out);
        return;
    }
#endif
    (void)mode;
    k3v_mx_split_x(x, (float *)(void *)out);
}

/* The chunk that begins at group g and has its split x at x, of K3V_MX_ROWS rows. */
K3V_INLINE void k3v_mx_chunk(int mode, const uint8_t *const *w, const uint8_t *const *s, uint64_t g, const uint8_t *x,
                             k3v_f (*acc)[K3V_PER_ROW]) {
#ifdef K3_LEAVES_AVX512_BF16
    if (mode == K3V_X_BF16) {
        k3v_mx_chunk_bf16(w, s, g, (const uint16_t *)(const void *)x, acc);
        return;
    }
#endif
    (void)mode;
    K3V_UNROLL
    for (int p = 0; p < K3V_MX_PARTS; p++) k3v_mx_step_f32(p, w, s, g, (const float *)(const void *)x, acc);
}

#if K3V_MX_ROWS == 4
K3V_INLINE __m128 k3v_mx_fold(int mode, k3v_f (*acc)[K3V_PER_ROW]) {
#ifdef K3_LEAVES_AVX512_BF16
    if (mode == K3V_X_BF16) return k3v_mx_fold_bf16(acc);
#endif
    (void)mode;
    return k3v_mx_fold_f32(acc);
}

#include "tiles_mxfp4_one.h"
#endif

/* ---- one token ------------------------------------------------------------------------------------- */

/* All blocks of x, each on a chunk of its own; absent elements are +0. */
K3V_INLINE void k3v_mx_split(int mode, const k3v_mx *m, const float *x, uint8_t *out) {
    for (uint32_t b = 0; b < m->n_blocks; b++)
        for (uint32_t i = 0; i < m->B; i += K3_CHUNK) {
            const float *p = x + (uint64_t)b * m->B + i;
            float tail[K3_CHUNK];
            if (m->B - i < K3_CHUNK) {
                __builtin_memset(tail, 0, sizeof tail);
                __builtin_memcpy(tail, p, (m->B - i) * sizeof(float));
                p = tail;
            }
            k3v_split_chunk(mode, p, out + ((uint64_t)b * k3v_mx_room(m->B) + i) * k3v_x_bytes(mode));
        }
}

/* K3V_MX_ROWS rows over G groups; `next` bytes ahead lies what comes after this tile. */
K3V_INLINE void k3v_mx_tile(int mode, const uint8_t *const *w, const uint8_t *const *s, const uint8_t *x, uint32_t G,
                            uint64_t next, k3v_f (*acc)[K3V_PER_ROW]) {
    uint32_t g = 0;
    K3V_UNROLL
    for (int r = 0; r < K3V_MX_ROWS; r++)
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) acc[r][v] = k3v_zero();
    for (; g + K3V_MX_CHUNK_GROUPS <= G; g += K3V_MX_CHUNK_GROUPS) {
        K3V_UNROLL
        for (int r = 0; r < K3V_MX_ROWS; r++) K3V_PREFETCH(w[r] + 16u * (uint64_t)g + next);
        k3v_mx_chunk(mode, w, s, g, x + (uint64_t)g * K3_MX_GROUP * k3v_x_bytes(mode), acc);
    }
    if (g < G) { /* groups that are absent have weights -0 beside x = +0, which changes nothing */
        uint8_t bytes[K3V_MX_ROWS][K3V_MX_CHUNK_BYTES], scales[K3V_MX_ROWS][K3V_MX_CHUNK_GROUPS];
        const uint8_t *wt[K3V_MX_ROWS], *st[K3V_MX_ROWS];
        for (int r = 0; r < K3V_MX_ROWS; r++) {
            __builtin_memset(bytes[r], 0, K3V_MX_CHUNK_BYTES);
            __builtin_memset(scales[r], K3_MX_ABSENT, K3V_MX_CHUNK_GROUPS);
            __builtin_memcpy(bytes[r], w[r] + 16u * (uint64_t)g, 16u * (uint64_t)(G - g));
            __builtin_memcpy(scales[r], s[r] + g, G - g);
            wt[r] = bytes[r];
            st[r] = scales[r];
        }
        k3v_mx_chunk(mode, wt, st, 0, x + (uint64_t)g * K3_MX_GROUP * k3v_x_bytes(mode), acc);
    }
}

/* Block b of rows r0 .. r0 + n - 1 (n <= 4; rows that do not exist repeat the first), groups not cut by blocks. */
K3V_INLINE __m128 k3v_mx_four(int mode, const k3v_mx *m, uint32_t r0, uint32_t n, uint32_t b, const uint8_t *x) {
    const uint8_t *w[4], *s[4];
    k3v_f acc[K3V_MX_ROWS][K3V_PER_ROW];
    const uint32_t G = m->B / K3_MX_GROUP;
    const uint64_t tile = 2u * (uint64_t)m->K, next = tile * (1u + K3V_MX_AHEAD / tile);
    const uint8_t *xb = x + (uint64_t)b * k3v_mx_room(m->B) * k3v_x_bytes(mode);
    for (uint32_t r = 0; r < 4u; r++) {
        const uint64_t row = r0 + (r < n ? r : 0u);
        w[r] = m->W + row * (m->K / 2u) + (uint64_t)b * (m->B / 2u);
        s[r] = m->S + row * (m->K / K3_MX_GROUP) + (uint64_t)b * G;
    }
#if K3V_MX_ROWS == 4
    k3v_mx_tile(mode, w, s, xb, G, next, acc);
    return k3v_mx_fold(mode, acc);
#else
    k3v_f quads[4];
    for (uint32_t r = 0; r < 4u; r++) {
        k3v_mx_tile(mode, w + r, s + r, xb, G, next, acc);
        quads[r] = k3v_mx_quads(acc[0]);
    }
    return k3v_mx_fold4(quads);
#endif
}

/* Out of line, one copy for each kind of x. */
#define K3V_MX_FOUR(name, mode)                                                                                      \
    static __attribute__((noinline)) __m128 name(const k3v_mx *m, uint32_t r0, uint32_t n, uint32_t b,          \
                                                      const uint8_t *x) {                                            \
        return k3v_mx_four(mode, m, r0, n, b, x);                                                                    \
    }
K3V_MX_FOUR(k3v_mx_four_f32, K3V_X_F32)
#ifdef K3_LEAVES_AVX512_BF16
K3V_MX_FOUR(k3v_mx_four_bf16, K3V_X_BF16)
#else
#define k3v_mx_four_bf16 k3v_mx_four_f32 /* never called */
#endif

K3V_INLINE __m128 k3v_mx_sum(int mode, const k3v_mx *m, uint32_t r0, uint32_t n, uint32_t b, const uint8_t *x) {
    return (mode == K3V_X_F32 ? k3v_mx_four_f32 : k3v_mx_four_bf16)(m, r0, n, b, x);
}

/* Blocks that begin inside a group, or rows longer than the stack takes: small models, and none. */
K3V_INLINE int k3v_mx_is_odd(const k3v_mx *m) {
    return m->B % K3_MX_GROUP != 0u || k3v_mx_room(m->B) * m->n_blocks > K3V_MX_SPLIT;
}

K3V_INLINE float k3v_mx_scalar(const k3v_mx *m, uint32_t r, uint32_t b, const float *x) {
    return k3_scalar_dot_mxfp4(m->W + (uint64_t)r * (m->K / 2u), m->S + (uint64_t)r * (m->K / K3_MX_GROUP), b * m->B,
                               x + (uint64_t)b * m->B, m->B);
}

/* One token's rows [row0, row1). */
K3V_INLINE void k3v_mx_rows_dot(int mode, const k3v_mx *m, uint32_t row0, uint32_t row1, const float *x, float *y) {
    _Alignas(64) uint8_t split[K3V_MX_SPLIT * 4u];
    float parts[8];
    uint32_t r, b;
    if (k3v_mx_is_odd(m)) {
        for (r = row0; r < row1; r++) {
            for (b = 0; b < m->n_blocks; b++) parts[b] = k3v_mx_scalar(m, r, b, x);
            y[r] = k3_tree(parts, m->n_blocks);
        }
        return;
    }
    k3v_mx_split(mode, m, x, split);
    r = row0;
#if K3V_MX_ROWS == 4
    if (m->n_blocks == 1u && m->K % K3_CHUNK == 0u) {
        r += (row1 - row0) / 4u * 4u;
        (mode == K3V_X_F32 ? k3v_mx_walk_rows_f32 : k3v_mx_walk_rows_bf16)(m, row0, r, split, y);
    }
#endif
    for (; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        __m128 d[8];
        for (b = 0; b < m->n_blocks; b++) d[b] = k3v_mx_sum(mode, m, r, n, b, split);
        k3v_store_n(y + r, k3v_tree4(d, m->n_blocks), n);
    }
}

/* D[(r - row0) * n_blocks + b]. */
K3V_INLINE void k3v_mx_rows_blocks(int mode, const k3v_mx *m, uint32_t row0, uint32_t row1, const float *x, float *D) {
    _Alignas(64) uint8_t split[K3V_MX_SPLIT * 4u];
    const uint32_t nb = m->n_blocks;
    uint32_t r, b, i;
    if (k3v_mx_is_odd(m)) {
        for (r = row0; r < row1; r++)
            for (b = 0; b < nb; b++) D[(uint64_t)(r - row0) * nb + b] = k3v_mx_scalar(m, r, b, x);
        return;
    }
    k3v_mx_split(mode, m, x, split);
    r = row0;
#if K3V_MX_ROWS == 4
    if (nb >= 4u && m->B % K3_CHUNK == 0u) {
        r += (row1 - row0) / 4u * 4u;
        (mode == K3V_X_F32 ? k3v_mx_walk_blocks_f32 : k3v_mx_walk_blocks_bf16)(m, row0, r, split, D);
    }
#endif
    for (; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        for (b = 0; b < nb; b += 4u) {
            const uint32_t here = nb - b < 4u ? nb - b : 4u;
            __m128 row[4];
            for (i = 0; i < 4u; i++) row[i] = i < here ? k3v_mx_sum(mode, m, r, n, b + i, split) : row[0];
            _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
            for (i = 0; i < n; i++) k3v_store_n(D + (uint64_t)(r - row0 + i) * nb + b, row[i], here);
        }
    }
}

/* ---- several tokens -------------------------------------------------------------------------------- */

/* Row r as bf16, the last chunk padded: out has room for whole chunks. */
K3V_INLINE void k3v_mx_decode(const k3v_mx *m, uint32_t r, uint16_t *out) {
    const uint8_t *w = m->W + (uint64_t)r * (m->K / 2u), *s = m->S + (uint64_t)r * (m->K / K3_MX_GROUP);
    const uint32_t G = m->K / K3_MX_GROUP;
    for (uint32_t g = 0; g < G; g += K3V_MX_CHUNK_GROUPS) {
        uint8_t bytes[K3V_MX_CHUNK_BYTES] = {0}, scales[K3V_MX_CHUNK_GROUPS] = {0};
        const int is_tail = G - g < K3V_MX_CHUNK_GROUPS;
        if (is_tail) {
            __builtin_memcpy(bytes, w + 16u * g, 16u * (G - g));
            __builtin_memcpy(scales, s + g, G - g);
        }
        k3v_mx_store_bf16(out + K3_MX_GROUP * g, is_tail ? bytes : w + 16u * g, is_tail ? scales : s + g);
    }
}

/* A row is decoded once for all tokens, and x is split once for as many rows as lie here. */
typedef struct {
    _Alignas(64) uint16_t rows[K3V_BLOCK_ELEMENTS + K3_CHUNK];
    k3v_tokens tokens;
} k3v_mx_work;

/* Decode rows from r on. Returns how many. */
K3V_INLINE uint32_t k3v_mx_block(const k3v_mx *m, uint32_t r, uint32_t row1, uint16_t *rows) {
    const uint32_t most = k3v_block_rows(m->K), n = row1 - r < most ? row1 - r : most;
    for (uint32_t k = 0; k < n; k++) k3v_mx_decode(m, r + k, rows + (uint64_t)k * m->K);
    return n;
}

/* Up to K3V_TOKS tokens from t on: x[k] is row at[t + k] of X, or row t + k. Returns their number. */
K3V_INLINE int k3v_picked(const float *X, uint64_t ldx, const uint32_t *at, uint32_t t, uint32_t n_tok, const float **x) {
    const int T = n_tok - t < K3V_TOKS ? (int)(n_tok - t) : K3V_TOKS;
    for (int k = 0; k < T; k++) x[k] = X + (at != NULL ? at[t + (uint32_t)k] : t + (uint32_t)k) * ldx;
    return T;
}

static __attribute__((noinline)) void k3v_mx_tokens_dot(const k3v_mx *m, uint32_t row0, uint32_t row1, const float *X,
                                                        uint64_t ldx, const uint32_t *at, uint32_t n_tok, float *Y,
                                                        uint64_t ldy) {
    k3v_mx_work s;
    for (uint32_t r = row0, n; r < row1; r += n) {
        n = k3v_mx_block(m, r, row1, s.rows);
        for (uint32_t t = 0; t < n_tok; t += K3V_TOKS) {
            const float *x[K3V_TOKS];
            const int T = k3v_picked(X, ldx, at, t, n_tok, x);
            k3v_rows_few(K3V_BF16, (const uint8_t *)s.rows, m->K, n, m->K, m->n_blocks, x, T, Y + t * ldy + r, ldy, &s.tokens);
        }
    }
}

/* n_tok not 1 more than a multiple of K3V_TOKS. */
static __attribute__((noinline)) void k3v_mx_tokens_blocks(const k3v_mx *m, uint32_t row0, uint32_t row1, const float *X,
                                                           const uint32_t *at, uint32_t n_tok, float *D, uint64_t ldd) {
    k3v_mx_work s;
    for (uint32_t r = row0, n; r < row1; r += n) {
        n = k3v_mx_block(m, r, row1, s.rows);
        for (uint32_t t = 0; t < n_tok; t += K3V_TOKS) {
            const float *x[K3V_TOKS];
            const int T = k3v_picked(X, m->K, at, t, n_tok, x);
            k3v_rows_sums(K3V_BF16, T, (const uint8_t *)s.rows, m->K, n, m->K, m->n_blocks, x, &s.tokens);
            k3v_store_blocks(s.tokens.d[0][0], K3V_TOKS * K3V_BLOCK_ROWS, K3V_BLOCK_ROWS, (uint32_t)T, n, m->n_blocks, D + t * ldd + (uint64_t)(r - row0) * m->n_blocks, ldd);
        }
    }
}

#if K3V_LANES == 16
/* By panels where they take it; else 0. y: of row0. */
K3V_INLINE int k3v_mx_panels(int kind, const k3v_mx *m, uint32_t row0, uint32_t row1, const float *X, uint64_t ldx,
                             const uint32_t *at, uint32_t n_tok, float *y, uint64_t ld, int is_blocks) {
    const k3p_matrix p = {m->W, m->S, 0, m->K, m->n_blocks, m->B, kind};
    const k3p_result out = {y, ld, is_blocks};
    if (!k3p_takes(&p, n_tok)) return 0;
    k3p_rows(NULL, &p, row0, row1, X, ldx, at, n_tok, &out);
    return 1;
}
#endif

/* ---- leaves ---------------------------------------------------------------------------------------- */

K3_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    uint32_t t;
    (void)c;
#if K3V_LANES == 16
    if (k3v_mx_panels(K3P_F32, &m, row0, row1, X, ldx, NULL, n_tok, Y + row0, ldy, 0)) return;
#endif
    if (K <= K3V_MX_DECODED && (n_tok > 1u || m.B % K3_MX_GROUP != 0u)) {
        k3v_mx_tokens_dot(&m, row0, row1, X, ldx, NULL, n_tok, Y, ldy);
        return;
    }
    for (t = 0; t < n_tok; t++) k3v_mx_rows_dot(K3V_X_F32, &m, row0, row1, X + t * ldx, Y + t * ldy);
}

K3_LEAF void k3_rows_dot_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                  uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y, uint64_t ldy) {
    const k3v_mx m = {W, S, K, 1u, K};
    (void)c;
#if K3V_LANES == 16
    if (k3v_mx_panels(K3P_F32, &m, row0, row1, X, K, at, n_tok, Y + row0, ldy, 0)) return;
#endif
    if (n_tok > 1u && K <= K3V_MX_DECODED) {
        k3v_mx_tokens_dot(&m, row0, row1, X, K, at, n_tok, Y, ldy);
        return;
    }
    for (uint32_t t = 0; t < n_tok; t++)
        k3v_mx_rows_dot(K3V_X_F32, &m, row0, row1, X + (uint64_t)at[t] * K, Y + t * ldy);
}

K3_LEAF void k3_rows_blocks_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                     uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,
                                     float *D, uint64_t ldd) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    /* A token that would be alone is quicker undecoded. */
    const uint32_t whole = K > K3V_MX_DECODED ? 0u : n_tok % K3V_TOKS == 1u ? n_tok - 1u : n_tok;
    (void)c;
#if K3V_LANES == 16
    if (k3v_mx_panels(K3P_F32, &m, row0, row1, X, K, at, n_tok, D, ldd, 1)) return;
#endif
    if (whole > 0u) k3v_mx_tokens_blocks(&m, row0, row1, X, at, whole, D, ldd);
    for (uint32_t t = whole; t < n_tok; t++)
        k3v_mx_rows_blocks(K3V_X_F32, &m, row0, row1, X + (uint64_t)at[t] * K, D + t * ldd);
}

K3_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    (void)c;
    k3v_mx_rows_blocks(K3V_X_F32, &m, row0, row1, X, D);
}

#endif

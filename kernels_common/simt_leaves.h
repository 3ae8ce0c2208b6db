/* The leaves of leaves.h for a block of GPU lanes, once for both vendors. C++.
 *
 * A team of 16 hardware lanes sums a row: hardware lane t holds the contract's lanes 4t .. 4t+3, that is 8
 * neighbouring elements of every chunk of 128 (16 bytes of bf16, 4 bytes of MXFP4). So rule 3's quad is added
 * in registers and the 16 quads by halving inside the team, four cross-lane steps a row. Both the halving
 * and its mirror image add the same two numbers, so every lane of the team ends with the row's bits.
 *
 * Block-collective: every lane calls with the same arguments. No leaf uses a barrier or shared memory: inputs
 * must be visible before the call, outputs are after the body's next K3_SYNC. Teams do not wait for each other.
 * The scalar results of k3_dot_f32 and k3_sum_f32 are computed by every team and returned to every lane.
 *
 * The dialect supplies k3_team_partner<M>, k3_load4, k3_stream4, k3_stream1, K3_LANE, K3_BLOCK_LANES, K3_UNROLL,
 * and how leaves are called: K3_TILE_LEAF (row tiles, many registers), K3_SMALL_LEAF (the others).
 * Bits: gated against kernels_cpu/leaves/scalar.h by tests/kernels/test_simt_leaves.py, which runs this file
 * with emulated lanes. It has not run on a GPU yet. */
#ifndef K3_SIMT_LEAVES_H
#define K3_SIMT_LEAVES_H

#include "leaves.h"

#define K3_TEAM 16u                       /* hardware lanes a row */
#define K3_TEAM_ELEMENTS 8u               /* elements of a chunk that one hardware lane owns */
#define K3_N_TEAMS (K3_BLOCK_LANES / K3_TEAM)
K3_STATIC_ASSERT(K3_TEAM * K3_TEAM_ELEMENTS == K3_CHUNK, "a team covers a chunk");

/* The neutral element of fma(w, x, acc) is w = -0, x = +0; with +0 a -0 accumulator would become +0. */
#define K3_PAD_W (-0.0f)
#define K3_PAD_X 0.0f

/* Rule 5's tree over values that arrive in order: equal to k3_tree without an array, so that nothing is
 * indexed by a variable and everything stays in registers. What the last of 2, 4, 8 or 16 pushes returns is the
 * root. */
struct K3Tree {
    float level0 = 0.0f, level1 = 0.0f, level2 = 0.0f, level3 = 0.0f;
    K3_MEMBER float push(uint32_t index, float v) {
        if (!(index & 1u)) return level0 = v;
        v = level0 + v;
        if (!(index & 2u)) return level1 = v;
        v = level1 + v;
        if (!(index & 4u)) return level2 = v;
        v = level2 + v;
        if (!(index & 8u)) return level3 = v;
        return level3 + v;
    }
};

/* ---- one lane's part of rule 3 -------------------------------------------------------------------- */

/* Four pairs into four accumulators, odd element first. */
K3_FN void k3_quad_fma(float acc[4], const float w[8], const float x[8]) {
    K3_UNROLL
    for (int j = 0; j < 4; j++) {
        acc[j] = k3_fma(w[2 * j + 1], x[2 * j + 1], acc[j]);
        acc[j] = k3_fma(w[2 * j], x[2 * j], acc[j]);
    }
}

K3_FN void k3_quad_add(float acc[4], const float a[8]) {
    K3_UNROLL
    for (int j = 0; j < 4; j++) {
        acc[j] = acc[j] + a[2 * j + 1];
        acc[j] = acc[j] + a[2 * j];
    }
}

K3_FN float k3_quad_fold(const float acc[4]) { return (acc[0] + acc[2]) + (acc[1] + acc[3]); }

/* The 16 quads by halving; every lane of the team gets the result. The order 8, 4, 2, 1 is what the dialects'
 * k3_team_partner relies on. */
K3_FN float k3_team_fold(const float acc[4]) {
    float v = k3_quad_fold(acc);
    v = v + k3_team_partner<8>(v);
    v = v + k3_team_partner<4>(v);
    v = v + k3_team_partner<2>(v);
    return v + k3_team_partner<1>(v);
}

/* ---- where eight elements come from --------------------------------------------------------------- */

K3_FN int k3_aligned(const void *p, uint64_t bytes) { return ((uint64_t)p & (bytes - 1u)) == 0u; }

/* load8 reads elements i .. i+7, all present and aligned; at reads one. */
struct K3RowF32 {
    const float *w;
    K3_MEMBER void load8(uint32_t i, float out[8]) const {
        uint32_t v[8];
        k3_load4(w + i, v);
        k3_load4(w + i + 4u, v + 4);
        K3_UNROLL
        for (int j = 0; j < 8; j++) out[j] = k3_bits_to_f32(v[j]);
    }
    K3_MEMBER float at(uint32_t i) const { return w[i]; }
};

struct K3RowBf16 {
    const uint16_t *w;
    K3_MEMBER void load8(uint32_t i, float out[8]) const {
        uint32_t v[4];
        k3_stream4(w + i, v);
        K3_UNROLL
        for (int j = 0; j < 4; j++) {
            out[2 * j] = k3_bits_to_f32(v[j] << 16);
            out[2 * j + 1] = k3_bits_to_f32(v[j] & 0xffff0000u);
        }
    }
    K3_MEMBER float at(uint32_t i) const { return k3_bf16_to_f32(w[i]); }
};

/* first: column the block begins at, a multiple of 32 for load8, else only even. */
struct K3RowMxfp4 {
    const uint8_t *w, *s;
    uint32_t first;
    K3_MEMBER void load8(uint32_t i, float out[8]) const {
        const uint32_t q = k3_stream1(w + ((first + i) >> 1)), scale = s[(first + i) / K3_MX_GROUP];
        K3_UNROLL
        for (int j = 0; j < 8; j++) out[j] = k3_mxfp4_value((q >> (4 * j)) & 15u, scale);
    }
    K3_MEMBER float at(uint32_t i) const {
        const uint32_t column = first + i;
        return k3_mxfp4_value((uint32_t)(w[column >> 1] >> (4u * (column & 1u))) & 15u, s[column / K3_MX_GROUP]);
    }
};

/* Elements i .. i+7 of a row of K; the absent ones become `pad`. */
template <bool kVector, class Row>
K3_FN void k3_eight(const Row &row, uint32_t i, uint32_t K, float pad, float out[8]) {
    if constexpr (kVector) {
        row.load8(i, out);
    } else {
        K3_UNROLL
        for (uint32_t j = 0; j < 8u; j++) out[j] = i + j < K ? row.at(i + j) : pad;
    }
}

/* ---- matrices: how a block of a row is addressed -------------------------------------------------- */

struct K3MatrixF32 {
    const float *W;
    uint64_t ld;
    K3_MEMBER K3RowF32 row(uint32_t r, uint32_t first) const { return K3RowF32{W + r * ld + first}; }
    K3_MEMBER int vector(uint32_t B) const { return k3_aligned(W, 16u) && ld % 4u == 0u && B % 8u == 0u; }
};

struct K3MatrixBf16 {
    const uint16_t *W;
    uint64_t ld;
    K3_MEMBER K3RowBf16 row(uint32_t r, uint32_t first) const { return K3RowBf16{W + r * ld + first}; }
    K3_MEMBER int vector(uint32_t B) const { return k3_aligned(W, 16u) && ld % 8u == 0u && B % 8u == 0u; }
};

struct K3MatrixMxfp4 {
    const uint8_t *W, *S;
    uint32_t K;
    K3_MEMBER K3RowMxfp4 row(uint32_t r, uint32_t first) const {
        return K3RowMxfp4{W + (uint64_t)r * (K / 2u), S + (uint64_t)r * (K / K3_MX_GROUP), first};
    }
    K3_MEMBER int vector(uint32_t B) const { return k3_aligned(W, 4u) && B % K3_MX_GROUP == 0u; }
};

/* ---- tiles: R rows times T tokens a team ---------------------------------------------------------- */

/* One call's arguments. D is 0, or takes the block dots without the tree. */
template <class Matrix>
struct K3RowsCall {
    Matrix W;
    uint32_t row0, row1, K, n_blocks;
    const float *X;
    uint64_t ldx;
    uint32_t n_tok;
    float *Y;
    uint64_t ldy;
    float *D;
};

/* The block b of R rows and T tokens; rows and tokens past the end repeat the last one and are not stored. */
template <int R, int T, bool kVector, class Matrix>
K3_FN void k3_tile_block(const K3RowsCall<Matrix> &a, uint32_t r, uint32_t t, uint32_t b, float sum[R][T]) {
    const uint32_t B = a.K / a.n_blocks, first = b * B, last_row = a.row1 - 1u, last_tok = a.n_tok - 1u;
    float acc[R][T][4] = {};
    for (uint32_t i = K3_TEAM_ELEMENTS * (K3_LANE % K3_TEAM); i < B; i += K3_CHUNK) {
        float x[T][8], w[8];
        K3_UNROLL
        for (uint32_t v = 0; v < T; v++) {
            const uint32_t tok = t + v < last_tok ? t + v : last_tok;
            k3_eight<kVector>(K3RowF32{a.X + tok * a.ldx + first}, i, B, K3_PAD_X, x[v]);
        }
        K3_UNROLL
        for (uint32_t u = 0; u < R; u++) {
            k3_eight<kVector>(a.W.row(r + u < last_row ? r + u : last_row, first), i, B, K3_PAD_W, w);
            K3_UNROLL
            for (uint32_t v = 0; v < T; v++) k3_quad_fma(acc[u][v], w, x[v]);
        }
    }
    K3_UNROLL
    for (int u = 0; u < R; u++)
        K3_UNROLL
        for (int v = 0; v < T; v++) sum[u][v] = k3_team_fold(acc[u][v]);
}

template <int R, int T, bool kVector, class Matrix>
K3_FN void k3_tile(const K3RowsCall<Matrix> &a, uint32_t r, uint32_t t) {
    const bool stores = K3_LANE % K3_TEAM == 0u;
    K3Tree tree[R][T];
    float root[R][T] = {};
    for (uint32_t b = 0; b < a.n_blocks; b++) {
        float sum[R][T];
        k3_tile_block<R, T, kVector>(a, r, t, b, sum);
        K3_UNROLL
        for (uint32_t u = 0; u < R; u++)
            K3_UNROLL
            for (int v = 0; v < T; v++) {
                root[u][v] = tree[u][v].push(b, sum[u][v]);
                if (a.D && stores && r + u < a.row1)
                    a.D[(uint64_t)(r + u - a.row0) * a.n_blocks + b] = sum[u][v];
            }
    }
    K3_UNROLL
    for (uint32_t u = 0; u < R; u++)
        K3_UNROLL
        for (uint32_t v = 0; v < T; v++)
            if (!a.D && stores && r + u < a.row1 && t + v < a.n_tok) a.Y[(t + v) * a.ldy + r + u] = root[u][v];
}

template <int R, int T, bool kVector, class Matrix>
K3_FN void k3_tiles(const K3RowsCall<Matrix> &a) {
    for (uint32_t r = a.row0 + R * (K3_LANE / K3_TEAM); r < a.row1; r += R * K3_N_TEAMS)
        for (uint32_t t = 0; t < a.n_tok; t += T) k3_tile<R, T, kVector>(a, r, t);
}

/* Four rows a team share the activations they read; with few rows all teams get one. Several tokens share the
 * weights. Tile shapes change no bits. */
template <class Matrix>
K3_FN void k3_rows(const K3RowsCall<Matrix> &a) {
    const uint32_t B = a.K / a.n_blocks;
    const int vector = a.W.vector(B) && k3_aligned(a.X, 16u) && a.ldx % 4u == 0u;
    if (!vector)
        k3_tiles<1, 1, false>(a);
    else if (a.n_tok > 1u)
        k3_tiles<2, 4, true>(a);
    else if (a.row1 - a.row0 >= 4u * K3_N_TEAMS)
        k3_tiles<4, 1, true>(a);
    else
        k3_tiles<1, 1, true>(a);
}

K3_TILE_LEAF void k3_rows_dot_bf16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                              uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                              float *Y, uint64_t ldy) {
    (void)c;
    k3_rows(K3RowsCall<K3MatrixBf16>{{W, ldw}, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy, 0});
}

K3_TILE_LEAF void k3_rows_dot_f32(const K3Ctx *c, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                             uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                             float *Y, uint64_t ldy) {
    (void)c;
    k3_rows(K3RowsCall<K3MatrixF32>{{W, ldw}, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy, 0});
}

K3_TILE_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy) {
    (void)c;
    k3_rows(K3RowsCall<K3MatrixMxfp4>{{W, S, K}, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy, 0});
}

K3_TILE_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    (void)c;
    k3_rows(K3RowsCall<K3MatrixMxfp4>{{W, S, K}, row0, row1, K, n_blocks, X, 0, 1, 0, 0, D});
}

/* ---- scalars -------------------------------------------------------------------------------------- */

template <bool kVector>
K3_FN float k3_team_dot(const float *a, const float *b, uint32_t K) {
    float acc[4] = {};
    for (uint32_t i = K3_TEAM_ELEMENTS * (K3_LANE % K3_TEAM); i < K; i += K3_CHUNK) {
        float w[8], x[8];
        k3_eight<kVector>(K3RowF32{a}, i, K, K3_PAD_W, w);
        k3_eight<kVector>(K3RowF32{b}, i, K, K3_PAD_X, x);
        k3_quad_fma(acc, w, x);
    }
    return k3_team_fold(acc);
}

K3_SMALL_LEAF float k3_dot_f32(const K3Ctx *c, const float *a, const float *b, uint32_t K) {
    (void)c;
    if (k3_aligned(a, 16u) && k3_aligned(b, 16u) && K % 8u == 0u) return k3_team_dot<true>(a, b, K);
    return k3_team_dot<false>(a, b, K);
}

K3_SMALL_LEAF float k3_sum_f32(const K3Ctx *c, const float *a, uint32_t K) {
    float acc[4] = {};
    (void)c;
    for (uint32_t i = K3_TEAM_ELEMENTS * (K3_LANE % K3_TEAM); i < K; i += K3_CHUNK) {
        float v[8];
        k3_eight<false>(K3RowF32{a}, i, K, -0.0f, v);
        k3_quad_add(acc, v);
    }
    return k3_team_fold(acc);
}

/* ---- columns: one hardware lane a column, so that neighbouring lanes read neighbouring words ------- */

/* Quads 0, 8, 4, 12, 2, ...: in this order of arrival, halving is K3Tree's in-order tree. */
K3_FN uint32_t k3_halving_order(uint32_t i) {
    return ((i & 1u) << 3) | ((i & 2u) << 1) | ((i & 4u) >> 1) | ((i & 8u) >> 3);
}

K3_FN float k3_widen(float v) { return v; }
K3_FN float k3_widen(uint16_t v) { return k3_bf16_to_f32(v); }

/* Rule 3 over i of M[i * ld] x[i] in one lane: sixteen quads, each through all chunks, four accumulators live. */
template <class Word>
K3_FN float k3_column(const Word *M, uint64_t ld, uint32_t n, const float *x) {
    K3Tree tree;
    float root = 0.0f;
    for (uint32_t q = 0; q < K3_TEAM; q++) {
        float acc[4] = {};
        for (uint32_t i = K3_TEAM_ELEMENTS * k3_halving_order(q); i < n; i += K3_CHUNK) {
            float w[8], v[8];
            K3_UNROLL
            for (uint32_t j = 0; j < 8u; j++) {
                w[j] = i + j < n ? k3_widen(M[(i + j) * ld]) : K3_PAD_W;
                v[j] = i + j < n ? x[i + j] : K3_PAD_X;
            }
            k3_quad_fma(acc, w, v);
        }
        root = tree.push(q, k3_quad_fold(acc));
    }
    return root;
}

K3_SMALL_LEAF void k3_cols_dot_f32(const K3Ctx *c, const float *M, uint64_t ld, uint32_t n, uint32_t col0,
                             uint32_t col1, const float *x, float *y) {
    (void)c;
    K3_FOR(j, col0, col1) { y[j] = k3_column(M + j, ld, n, x); }
}

K3_SMALL_LEAF void k3_cols_dot_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0,
                              uint32_t col1, const float *x, float *y) {
    (void)c;
    K3_FOR(j, col0, col1) { y[j] = k3_column(M + j, ld, n, x); }
}

#endif

/* The leaf primitives: everything an op body needs that has a summation order (rules 3 to 6).
 *
 * This file is the interface and the parts whose text is the same everywhere. Each target supplies the
 * functions marked K3_LEAF: kernels_cpu/leaves/ (scalar.h is the definition of the bits; avx2.h and
 * avx512.h must equal it bit for bit) for the CPU, simt_leaves.h here for all GPUs.
 *
 * Conventions
 *   - The first argument is the context. A CPU leaf ignores it (pass 0 in tests); a GPU leaf finds its
 *     staging memory there and is block-collective: every lane calls it with the same arguments, and the
 *     result is visible to all lanes after the next K3_SYNC.
 *   - Lengths and leading dimensions count elements, never bytes. No alignment is required of any pointer
 *     beyond its element type's, nor of any length unless a line below says so.
 *   - Nothing may overlap an output. Outputs are written whole, never read.
 *   - The caller runs with subnormals flushed both ways (rule 1; k3_set_ftz on the CPU).
 *
 * Rule 3, the dot product of K elements. Pair p = i >> 1 goes to lane p mod 64. A lane takes its pairs in
 * increasing order, and in a pair the odd element first: acc = fma(w[2p+1], x[2p+1], acc), then
 * acc = fma(w[2p], x[2p], acc); accumulators start at +0; elements past the end are absent. Then quads of
 * neighbouring lanes, (a0 + a2) + (a1 + a3), and the 16 quads by halving: q[t] + q[t + 8], + 4, + 2, + 1.
 * A plain sum is the same with acc = acc + odd, acc = acc + even.
 * Wrong versions that pass every tolerance test: even before odd; halving before quads; padding with +0
 * (turns a -0 accumulator into +0; the neutral pads are w = -0, x = +0, and -0 in a plain sum).
 *
 * Rule 5, blocks. Where n_blocks > 1 (2, 4 or 8) the K elements are n_blocks equal parts, each summed by
 * rule 3, and the parts are added by k3_tree. A rank at TP t passes 8 / t and owns that subtree.
 *
 *   Y[t * ldy + r] for r in [row0, row1), t in [0, n_tok): the dot of row r of W with X[t * ldx ...]
 *     k3_rows_dot_bf16    W[r * ldw + i] bf16; K a multiple of n_blocks
 *     k3_rows_dot_mxfp4   W[r * K/2 + i/2], low nibble = even i; S[r * K/32 + i/32] scale bytes; K a multiple
 *                         of 32 and of 2 n_blocks. A block may begin inside a scale group.
 *     k3_rows_dot_f32     W[r * ldw + i] binary32
 *   Under the suffix _x16 the same values for X of which every element is a bf16 (mode bf16: the caller has
 *   rounded; low 16 bits zero, not looked at). X stays binary32 in memory; a target that multiplies bf16 pairs
 *   packs it, and the bits are those of the plain leaf.
 *     k3_rows_dot_bf16_x16, k3_rows_dot_mxfp4_x16, k3_rows_blocks_mxfp4_x16, and of the two _at below
 *   D[(r - row0) * n_blocks + b]: the block dots of one token, without the tree (the expert combine of
 *   rule 5 adds experts inside a block first)
 *     k3_rows_blocks_mxfp4
 *   The same values for tokens picked from X: token t is row at[t] of K elements; D of token t at D + t * ldd
 *     k3_rows_dot_mxfp4_at (one block), k3_rows_blocks_mxfp4_at
 *   y[j] for j in [col0, col1): rule 3 over i of M[i * ld + j] x[i]
 *     k3_cols_dot_f32, k3_cols_dot_bf16
 *   The second of n_tok x, ldx apart, and columns [0, cols) into y ldy apart; also as _x16
 *     k3_cols_tokens_bf16
 *   Y[h * ldy + j] for j < cols, h < n_mix: acc = fma(E[h * lde + i], rows[i * ld + j], acc) over i < n in order, from +0
 *     k3_mix_rows_f32
 *   kda_step.h's step of one token and head, S [D][D]; returns 0, with nothing done, where D is no number for it. Only where
 *   the dialect has it: elsewhere, and for such D, the body's own text is what it equals.
 *     k3_delta_f32
 *   The same of n_tok tokens behind each other, q, k and decay ldq apart, v ldv, y ldy, beta 1; first is the first token's
 *     k3_delta_tokens_f32
 *   scalars
 *     k3_dot_f32, k3_sum_f32   rule 3 at any length (a matrix row, an attention score, a softmax page)
 *     k3_axis_dot              rule 6: one rule-3 dot up to 512 elements, else 8 equal blocks and the tree
 *                              (K a multiple of 16 there; the config is refused otherwise)
 */
#ifndef K3_LEAVES_H
#define K3_LEAVES_H

#include "dialect.h"
#include "k3_math.h"

typedef struct K3Ctx K3Ctx;

#define K3_LANES 64u       /* rule 3 */
#define K3_CHUNK 128u      /* elements a chunk: one pair per lane */
#define K3_MX_GROUP 32u    /* columns a scale byte covers */
#define K3_AXIS_WHOLE 512u /* rule 6: longer axes are summed in blocks */
#define K3_AXIS_BLOCKS 8u

K3_LEAF void k3_rows_dot_bf16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                              uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                              float *Y, uint64_t ldy);
K3_LEAF void k3_rows_dot_f32(const K3Ctx *c, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                             uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                             float *Y, uint64_t ldy);
K3_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy);
K3_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D);
#ifdef K3_X16_LEAVES /* the dialect's leaves have bodies of their own for these */
K3_LEAF void k3_rows_dot_bf16_x16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                                  uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                                  float *Y, uint64_t ldy);
K3_LEAF void k3_rows_dot_mxfp4_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                   uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                                   uint32_t n_tok, float *Y, uint64_t ldy);
K3_LEAF void k3_rows_blocks_mxfp4_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                      uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D);
#else
#define k3_rows_dot_bf16_x16 k3_rows_dot_bf16
#define k3_rows_dot_mxfp4_x16 k3_rows_dot_mxfp4
#define k3_rows_blocks_mxfp4_x16 k3_rows_blocks_mxfp4
#endif
K3_LEAF float k3_dot_f32(const K3Ctx *c, const float *a, const float *b, uint32_t K);
K3_LEAF float k3_sum_f32(const K3Ctx *c, const float *a, uint32_t K);
K3_LEAF void k3_cols_dot_f32(const K3Ctx *c, const float *M, uint64_t ld, uint32_t n, uint32_t col0,
                             uint32_t col1, const float *x, float *y);
K3_LEAF void k3_cols_dot_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0,
                              uint32_t col1, const float *x, float *y);

/* ---- the same text on every target ---------------------------------------------------------------- */

#ifdef K3_TOKENS_LEAF
K3_LEAF void k3_mix_rows_f32(const K3Ctx *c, const float *rows, uint64_t ld, uint32_t n, uint32_t cols, const float *E,
                             uint64_t lde, uint32_t n_mix, float *Y, uint64_t ldy);
#else
K3_FN void k3_mix_rows_f32(const K3Ctx *c, const float *rows, uint64_t ld, uint32_t n, uint32_t cols, const float *E,
                           uint64_t lde, uint32_t n_mix, float *Y, uint64_t ldy) {
    uint32_t h, i;
    (void)c;
    for (h = 0; h < n_mix; h++) {
        K3_FOR(j, 0, cols) {
            float acc = 0.0f;
            for (i = 0; i < n; i++) acc = k3_fma(E[h * lde + i], rows[i * ld + j], acc);
            Y[h * ldy + j] = acc;
        }
    }
}
#endif

#ifdef K3_TOKENS_LEAF
K3_LEAF void k3_cols_tokens_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                                 uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy);
#else
K3_FN void k3_cols_tokens_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                               uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    uint32_t t;
    for (t = 0; t < n_tok; t++) k3_cols_dot_bf16(c, M, ld, n, 0u, cols, X + t * ldx, Y + t * ldy);
}
#endif

#ifdef K3_DELTA_LEAF
K3_LEAF int k3_delta_f32(const K3Ctx *c, float *S, uint32_t D, const float *q, const float *k, const float *v, const float *decay,
                         float beta, int first, float *y);
K3_LEAF int k3_delta_tokens_f32(const K3Ctx *c, float *S, uint32_t D, uint32_t n_tok, const float *q, const float *k,
                                const float *decay, uint64_t ldq, const float *v, uint64_t ldv, const float *beta, int first,
                                float *y, uint64_t ldy);
#endif

#ifdef K3_SOON_LEAF /* a hint: behind the rows of the next MXFP4 leaf, w and s are read; changes no value */
K3_LEAF void k3_soon(const K3Ctx *c, const uint8_t *w, const uint8_t *s);
#else
K3_FN void k3_soon(const K3Ctx *c, const uint8_t *w, const uint8_t *s) { (void)c, (void)w, (void)s; }
#endif

#ifdef K3_TOKENS_LEAF /* the dialect's leaves decode a row once for all tokens */
K3_LEAF void k3_rows_dot_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                  uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y, uint64_t ldy);
K3_LEAF void k3_rows_blocks_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                     uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,
                                     float *D, uint64_t ldd);
#else
K3_FN void k3_rows_dot_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y, uint64_t ldy) {
    uint32_t t;
    for (t = 0; t < n_tok; t++)
        k3_rows_dot_mxfp4(c, W, S, row0, row1, K, 1u, X + (uint64_t)at[t] * K, K, 1u, Y + t * ldy, ldy);
}
K3_FN void k3_rows_blocks_mxfp4_at(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                   uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,
                                   float *D, uint64_t ldd) {
    uint32_t t;
    for (t = 0; t < n_tok; t++)
        k3_rows_blocks_mxfp4(c, W, S, row0, row1, K, n_blocks, X + (uint64_t)at[t] * K, D + t * ldd);
}
#endif

#ifdef K3_X16_LEAVES
K3_LEAF void k3_rows_dot_mxfp4_at_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                      uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y,
                                      uint64_t ldy);
K3_LEAF void k3_rows_blocks_mxfp4_at_x16(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,
                                         uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,
                                         float *D, uint64_t ldd);
K3_LEAF void k3_cols_tokens_bf16_x16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                                     uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy);
#else
#define k3_cols_tokens_bf16_x16 k3_cols_tokens_bf16
#define k3_rows_dot_mxfp4_at_x16 k3_rows_dot_mxfp4_at
#define k3_rows_blocks_mxfp4_at_x16 k3_rows_blocks_mxfp4_at
#endif

/* Rule 5's binary tree over 1, 2, 4 or 8 neighbours. Spelled out, so that the order is readable. */
K3_FN float k3_tree(const float *b, uint32_t n) {
    if (n == 1u) return b[0];
    if (n == 2u) return b[0] + b[1];
    if (n == 4u) return (b[0] + b[1]) + (b[2] + b[3]);
    return ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + (b[6] + b[7]));
}

/* Rule 6: norm squares and AttnRes scores. Not for matrix rows, not for attention scores. */
K3_FN float k3_axis_dot(const K3Ctx *c, const float *a, const float *b, uint32_t K) {
    float parts[K3_AXIS_BLOCKS];
    uint32_t i;
    const uint32_t B = K / K3_AXIS_BLOCKS;
    if (K <= K3_AXIS_WHOLE) return k3_dot_f32(c, a, b, K);
    for (i = 0; i < K3_AXIS_BLOCKS; i++) parts[i] = k3_dot_f32(c, a + i * B, b + i * B, B);
    return k3_tree(parts, K3_AXIS_BLOCKS);
}

/* E2M1 code (sign, 2 exponent, 1 mantissa bit) times 2^(s - 127). A product with s = 1 may be subnormal and
 * is then zero by rule 1. s = 0 makes every weight of the group +0, whatever its code says (rule 4). */
K3_FN float k3_mxfp4_value(uint32_t code, uint32_t s) {
    const uint32_t m = code & 7u;
    const uint32_t magnitude = m < 2u ? m * 0x3f000000u : (m >> 1) * 0x00800000u + 0x3f000000u +
                                                          (m & 1u) * 0x00400000u;
    const float e2m1 = k3_bits_to_f32(magnitude | ((code & 8u) << 28));
    return s == 0u ? 0.0f : e2m1 * k3_bits_to_f32(s << 23);
}

#endif

/* What op bodies share: typed access to operands, scratch, spans of tokens and columns, peers' sums.
 *
 * Every body is `K3_FN void k3_op_<name>(K3Ctx* c, const K3Inst* inst, uint32_t u0, uint32_t u1)` and computes
 * units [u0, u1). Activations are token-major, [max_tokens][width]. A body that a fused op repeats is split so
 * that both call the same part; a fused op never has arithmetic of its own.
 *
 * Leaves are block-collective on a GPU: their inputs must be visible (K3_SYNC after a K3_FOR that wrote them),
 * all lanes call them, never from inside K3_FOR. A leaf that returns a float returns it to every lane; one that
 * writes memory needs K3_SYNC before its result is read. */
#ifndef K3_BODY_H
#define K3_BODY_H

#include "k3.h"
#include "k3_math.h"
#include "leaves.h"

#define K3_TILE_ROWS 64u  /* rows that a body keeps in scratch between two leaves */
/* The same of several tokens, whose x a leaf packs once a call. */
#define K3_GLU_ROWS(n_tok) ((n_tok) == 1u ? K3_TILE_ROWS : 4u * K3_TILE_ROWS)
#define K3_PART_EXTRA 16u /* words behind a part of a softmax: its maximum, its sum, zeros to a cache line's end */

K3_FN const float *k3_in(const K3Ctx *c, const K3Inst *inst, uint32_t slot) {
    return (const float *)k3_tensor(c, inst, slot);
}
K3_FN float *k3_out(const K3Ctx *c, const K3Inst *inst, uint32_t slot) { return (float *)k3_tensor(c, inst, slot); }
K3_FN const uint16_t *k3_bf16(const K3Ctx *c, const K3Inst *inst, uint32_t slot) {
    return (const uint16_t *)k3_tensor(c, inst, slot);
}
K3_FN const uint32_t *k3_words(const K3Ctx *c, const K3Inst *inst, uint32_t slot) {
    return (const uint32_t *)k3_tensor(c, inst, slot);
}
K3_FN const K3Expert *k3_experts(const K3Ctx *c, const K3Inst *inst, uint32_t slot) {
    return (const K3Expert *)k3_tensor(c, inst, slot);
}

K3_FN uint32_t k3_min(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The workgroup's scratch if it holds n floats, else 0 and a fault: the body must return at once. */
K3_FN float *k3_scratch(K3Ctx *c, uint64_t n) {
    if (n > c->scratch_floats) {
        k3_trap(c, K3_FAULT_SCRATCH, (uint32_t)n);
        return 0;
    }
    return c->scratch;
}

/* First token of an op that may belong to the head, which runs on the step's last tokens only. */
K3_FN uint32_t k3_first_token(const K3Ctx *c, uint32_t head_only) {
    return head_only ? k3_min(c->step->head_from, c->step->n_tokens) : 0u;
}

/* How many of the tokens from t on, at most `most`, go on in one sequence. */
K3_FN uint32_t k3_run_of(const K3Step *step, uint32_t t, uint32_t most) {
    uint32_t n = 1;
    while (n < most && t + n < step->n_tokens && step->slot[t + n] == step->slot[t] && step->position[t + n] != 0u) n++;
    return n;
}

/* Rule 8: a sum of squares, a score or a logit that is not finite stops the run. */
K3_FN void k3_check_finite(K3Ctx *c, float value, uint32_t detail) {
    if (k3_not_finite(value)) k3_trap(c, K3_FAULT_NONFINITE, detail);
}

/* ---- rounding points of mode bf16 ---- */

/* Whether an instruction's flag (K3_ADD_ROUND and so on) is set. */
K3_FN int k3_flag(const K3Inst *inst, uint32_t bit) { return (inst->flags & bit) != 0u; }

/* v behind a rounding point: the nearest bf16, if flagged. */
K3_FN float k3_rnd(float v, int round) { return round ? k3_nearest_bf16(v) : v; }

/* Columns [col0, col1) of n_tok rows behind a rounding point. What wrote them need not be visible yet. */
K3_FN void k3_round_columns(K3Ctx *c, float *y, uint64_t ldy, uint32_t col0, uint32_t col1, uint32_t n_tok, int round) {
    uint32_t t;
    if (!round) return;
    K3_SYNC(c);
    for (t = 0; t < n_tok; t++) {
        float *row = y + (uint64_t)t * ldy;
        K3_FOR(j, col0, col1) { row[j] = k3_rnd(row[j], 1); }
    }
}

/* x is an operand of the instruction, so that all its slices find the same there: a leaf may keep what it makes of it. Never
 * of scratch, where the next tile or slice has other values. */
K3_FN void k3_same_x(K3Ctx *c, const float *x) {
#ifdef K3_KEEPS_X
    c->same_x = x;
#else
    (void)c, (void)x;
#endif
}

/* k3_rows_dot_bf16 of x that may be known to hold bf16 values (x_bf16: the leaf may pack it, same bits). */
K3_FN void k3_linear_bf16(K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,
                          uint32_t n_blocks, const float *x, uint64_t ldx, uint32_t n_tok, float *y, uint64_t ldy,
                          int x_bf16) {
#ifdef K3_X16_LEAVES
    if (x_bf16) {
        k3_rows_dot_bf16_x16(c, W, ldw, row0, row1, K, n_blocks, x, ldx, n_tok, y, ldy);
        return;
    }
#endif
    (void)x_bf16;
    k3_rows_dot_bf16(c, W, ldw, row0, row1, K, n_blocks, x, ldx, n_tok, y, ldy);
}

/* The same of k3_rows_dot_mxfp4. */
K3_FN void k3_linear_mxfp4(K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,
                           const float *x, float *y, uint64_t ldy, int x_bf16) {
#ifdef K3_X16_LEAVES
    if (x_bf16) {
        k3_rows_dot_mxfp4_x16(c, W, S, row0, row1, K, 1u, x, K, 1u, y, ldy);
        return;
    }
#endif
    (void)x_bf16;
    k3_rows_dot_mxfp4(c, W, S, row0, row1, K, 1u, x, K, 1u, y, ldy);
}

/* The same of the leaves for picked tokens. */
K3_FN void k3_linear_mxfp4_at(K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,
                              const float *X, const uint32_t *at, uint32_t n_tok, float *y, uint64_t ldy, int x_bf16) {
#ifdef K3_X16_LEAVES
    if (x_bf16) {
        k3_rows_dot_mxfp4_at_x16(c, W, S, row0, row1, K, X, at, n_tok, y, ldy);
        return;
    }
#endif
    (void)x_bf16;
    k3_rows_dot_mxfp4_at(c, W, S, row0, row1, K, X, at, n_tok, y, ldy);
}

K3_FN void k3_blocks_mxfp4_at(K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,
                              uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok, float *d, uint64_t ldd,
                              int x_bf16) {
#ifdef K3_X16_LEAVES
    if (x_bf16) {
        k3_rows_blocks_mxfp4_at_x16(c, W, S, row0, row1, K, n_blocks, X, at, n_tok, d, ldd);
        return;
    }
#endif
    (void)x_bf16;
    k3_rows_blocks_mxfp4_at(c, W, S, row0, row1, K, n_blocks, X, at, n_tok, d, ldd);
}

/* ---- peers ---- */

typedef struct K3Peers {
    const float *rank[8];
    uint32_t n;
} K3Peers;

K3_FN K3Peers k3_peers(const K3Ctx *c, const K3Inst *inst, uint32_t slot) {
    K3Peers p;
    uint32_t r;
    p.n = c->n_ranks;
    for (r = 0; r < 8u; r++) p.rank[r] = k3_peer(c, inst, slot, r < p.n ? r : c->rank);
    return p;
}

/* Element i of the all-reduced tensor of n ranks: their subtrees in rule 5's tree. Never left to right. */
K3_INLINE float k3_peer_sum_of(const float *const *x, uint32_t n, uint64_t i) {
    if (n == 1u) return x[0][i];
    if (n == 2u) return x[0][i] + x[1][i];
    if (n == 4u) return (x[0][i] + x[1][i]) + (x[2][i] + x[3][i]);
    return ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + ((x[4][i] + x[5][i]) + (x[6][i] + x[7][i]));
}
K3_FN float k3_peer_sum(const K3Peers *p, uint64_t i) { return k3_peer_sum_of(p->rank, p->n, i); }

/* y[i] = residual[i] + (up[i] + element at + i of the all-reduced tensor), each sum behind a rounding point; up may be absent. */
K3_INLINE void k3_reduce_part(const K3Peers *p, uint32_t n_ranks, uint64_t at, const float *up, const float *K3_RESTRICT residual,
                              uint32_t n, float *K3_RESTRICT y, int round) {
    K3_FOR(i, 0, n) {
        float v = k3_rnd(k3_peer_sum_of(p->rank, n_ranks, at + i), round);
        if (up) v = k3_rnd(up[i] + v, round);
        y[i] = k3_rnd(residual[i] + v, round);
    }
}

/* The same; on one lane each case is a loop with nothing to ask in it, or a compiler goes element by element. */
K3_INLINE void k3_reduce_columns(const K3Peers *p, uint64_t at, const float *up, const float *residual, uint32_t n, float *y,
                                 int round) {
#ifdef K3_ONE_LANE
    if (round) {
        if (p->n == 1u) k3_reduce_part(p, 1u, at, up, residual, n, y, 1);
        else if (p->n == 2u) k3_reduce_part(p, 2u, at, up, residual, n, y, 1);
        else if (p->n == 4u) k3_reduce_part(p, 4u, at, up, residual, n, y, 1);
        else k3_reduce_part(p, 8u, at, up, residual, n, y, 1);
        return;
    }
    if (p->n == 1u) k3_reduce_part(p, 1u, at, up, residual, n, y, 0);
    else if (p->n == 2u) k3_reduce_part(p, 2u, at, up, residual, n, y, 0);
    else if (p->n == 4u) k3_reduce_part(p, 4u, at, up, residual, n, y, 0);
    else k3_reduce_part(p, 8u, at, up, residual, n, y, 0);
#else
    k3_reduce_part(p, p->n, at, up, residual, n, y, round);
#endif
}

#endif

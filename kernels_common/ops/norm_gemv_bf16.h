/* y[t][r] = rule 3 over row r of w with rmsnorm(x[t]; norm, eps).
 *
 * Layout: x f32 [T][K], norm bf16 [K], w bf16 [rows][K], y f32 [T][width]. Unit: row. Every slice norms every
 * token again: cheaper than a hand-off. Reads x, norm, w; writes y. Scratch: T x K. Fault: NONFINITE, token. */
#ifndef K3_OP_NORM_GEMV_BF16_H
#define K3_OP_NORM_GEMV_BF16_H

#include "rmsnorm.h"

K3_FN void k3_op_norm_gemv_bf16(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_NORM_GEMV_BF16_K];
    const uint32_t from = k3_first_token(c, inst->param[K3_NORM_GEMV_BF16_HEAD_ONLY]);
    const uint32_t n_tok = c->step->n_tokens - from;
    const float *x = k3_in(c, inst, K3_NORM_GEMV_BF16_X) + (uint64_t)from * K;
    float *y = k3_out(c, inst, K3_NORM_GEMV_BF16_Y) + (uint64_t)from * inst->width;
    const int norm_round = k3_flag(inst, K3_NORM_GEMV_BF16_NORM_ROUND);
    float *normed = k3_scratch(c, (uint64_t)n_tok * K);
    uint32_t t;
    if (!normed) return;
    for (t = 0; t < n_tok; t++)
        k3_rmsnorm_row(c, x + (uint64_t)t * K, k3_bf16(c, inst, K3_NORM_GEMV_BF16_NORM), K,
                       k3_f32_param(inst, K3_NORM_GEMV_BF16_EPS), normed + (uint64_t)t * K, from + t, norm_round);
    K3_SYNC(c);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_NORM_GEMV_BF16_W), K, u0, u1, K, 1u, normed, K, n_tok, y, inst->width,
                   norm_round);
    k3_round_columns(c, y, inst->width, u0, u1, n_tok, k3_flag(inst, K3_NORM_GEMV_BF16_ROUND));
}

#endif

/* y[t][r] = rule 3 over row r of w with x[t], rounded if flagged.
 *
 * Layout: w bf16 [rows][K], x f32 [T][K], y f32 [T][width]. Unit: row, which is a column of y.
 * head_only: tokens from head_from on (the rest of y keeps what it had). Reads x, w; writes y. */
#ifndef K3_OP_GEMV_BF16_H
#define K3_OP_GEMV_BF16_H

#include "body.h"

K3_FN void k3_op_gemv_bf16(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_GEMV_BF16_K];
    const uint32_t from = k3_first_token(c, inst->param[K3_GEMV_BF16_HEAD_ONLY]);
    const float *x = k3_in(c, inst, K3_GEMV_BF16_X) + (uint64_t)from * K;
    float *y = k3_out(c, inst, K3_GEMV_BF16_Y) + (uint64_t)from * inst->width;
    const uint32_t n_tok = c->step->n_tokens - from;
    const int round = k3_flag(inst, K3_GEMV_BF16_ROUND); /* then x holds bf16 values */
    k3_same_x(c, x);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_GEMV_BF16_W), K, u0, u1, K, 1u, x, K, n_tok, y, inst->width, round);
    k3_round_columns(c, y, inst->width, u0, u1, n_tok, round);
}

#endif

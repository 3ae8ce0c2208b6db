/* y[t][r] = gemv_bf16_blocks of situ(gate, up).
 *
 * Every slice gates every token again: a shard of the unit is small, and a hand-off and a buffer are saved. Layout:
 * gate, up f32 [T][K]; else gemv_bf16_blocks.h. Unit: row. Reads gate, up, w; writes y. Scratch: T x K. */
#ifndef K3_OP_SITU_GEMV_BLOCKS_H
#define K3_OP_SITU_GEMV_BLOCKS_H

#include "body.h"

K3_FN void k3_op_situ_gemv_blocks(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_SITU_GEMV_BLOCKS_K], n_tok = c->step->n_tokens;
    const float *gate = k3_in(c, inst, K3_SITU_GEMV_BLOCKS_GATE), *up = k3_in(c, inst, K3_SITU_GEMV_BLOCKS_UP);
    const float beta = k3_f32_param(inst, K3_SITU_GEMV_BLOCKS_BETA);
    const float linear = k3_f32_param(inst, K3_SITU_GEMV_BLOCKS_LINEAR_BETA);
    const int round = k3_flag(inst, K3_SITU_GEMV_BLOCKS_ROUND);
    float *act = k3_scratch(c, (uint64_t)n_tok * K);
    if (!act) return;
    K3_FOR(j, 0, n_tok * K) { act[j] = k3_rnd(k3_situ(gate[j], up[j], beta, linear), round); }
    K3_SYNC(c);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_SITU_GEMV_BLOCKS_W), K, u0, u1, K,
                   inst->param[K3_SITU_GEMV_BLOCKS_N_BLOCKS], act, K, n_tok,
                   k3_out(c, inst, K3_SITU_GEMV_BLOCKS_Y), inst->width, round);
}

#endif

/* y = [o_B | m_B | s_B | 0 ...]: what the finished blocks alone give to attn_res, before the prefix is known.
 *
 * Formula: attn_res.h. Nothing of the running prefix enters, so this is off the chain of a token. Layout: blocks f32
 * [n][max_tokens][K], res_norm, res_proj bf16 [K], y f32 [T][width], width = K + K3_PART_EXTRA. Unit: token. Reads
 * all; writes y. Scratch: K + n_blocks. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_ATTN_PART_H
#define K3_OP_ATTN_PART_H

#include "attn_res.h"

/* One token. */
K3_FN void k3_part_row(K3Ctx *c, const K3Mix *m, float *y, uint32_t token) {
    float s_B;
    const float m_B = k3_mix_part(c, m, token, y, &s_B);
    K3_FOR(j, 0, K3_PART_EXTRA) { y[m->width + j] = j == 0u ? m_B : j == 1u ? s_B : 0.0f; }
}

K3_FN void k3_op_attn_part(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    float *y = k3_out(c, inst, K3_ATTN_PART_Y);
    K3Mix m;
    uint32_t t;
    if (!k3_mix_begin(c, &m, k3_in(c, inst, K3_ATTN_PART_BLOCKS), k3_bf16(c, inst, K3_ATTN_PART_RES_NORM),
                      k3_bf16(c, inst, K3_ATTN_PART_RES_PROJ), inst->param[K3_ATTN_PART_N_BLOCKS],
                      inst->width - K3_PART_EXTRA, k3_f32_param(inst, K3_ATTN_PART_EPS), 0))
        return;
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++) {
        k3_part_row(c, &m, y + (uint64_t)t * inst->width, t);
        K3_SYNC(c); /* the next token overwrites the scores */
    }
}

#endif

/* y = rmsnorm(attn_res(prefix, blocks); norm, norm_eps).
 *
 * Layout and formula: attn_res.h, rmsnorm.h; the mix passes through y. Unit: token.
 * Reads all operands; writes y. Scratch: width + n_blocks. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_ATTN_RES_NORM_H
#define K3_OP_ATTN_RES_NORM_H

#include "attn_res.h"

K3_FN void k3_op_attn_res_norm(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *prefix = k3_in(c, inst, K3_ATTN_RES_NORM_PREFIX);
    float *y = k3_out(c, inst, K3_ATTN_RES_NORM_Y);
    K3Mix m;
    uint32_t t;
    if (!k3_mix_begin(c, &m, k3_in(c, inst, K3_ATTN_RES_NORM_BLOCKS), k3_bf16(c, inst, K3_ATTN_RES_NORM_RES_NORM),
                      k3_bf16(c, inst, K3_ATTN_RES_NORM_RES_PROJ), inst->param[K3_ATTN_RES_NORM_N_BLOCKS],
                      inst->width, k3_f32_param(inst, K3_ATTN_RES_NORM_EPS),
                      k3_flag(inst, K3_ATTN_RES_NORM_ROUND)))
        return;
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++) {
        float *row = y + (uint64_t)t * m.width;
        k3_mix_row(c, &m, prefix + (uint64_t)t * m.width, row, t);
        K3_SYNC(c);
        k3_rmsnorm_row(c, row, k3_bf16(c, inst, K3_ATTN_RES_NORM_NORM), m.width,
                       k3_f32_param(inst, K3_ATTN_RES_NORM_NORM_EPS), row, t, m.round);
    }
}

#endif

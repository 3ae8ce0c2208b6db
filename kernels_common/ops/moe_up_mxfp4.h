/* y[t][s][r] = rule 3 over row r of w[expert s of t] with z[t].
 *
 * Layout: z f32 [T][K]; route [T][2 top_k] words, ids first; w one K3Expert per expert, packed [rows][K / 2],
 * scale [rows][K / 32]; y f32 [T][top_k][rows]. Unit: row of an expert, a column of every [rows].
 * Reads z, route, w; writes y. */
#ifndef K3_OP_MOE_UP_MXFP4_H
#define K3_OP_MOE_UP_MXFP4_H

#include "body.h"

K3_FN void k3_op_moe_up_mxfp4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_MOE_UP_MXFP4_K], top_k = inst->param[K3_MOE_UP_MXFP4_TOP_K];
    const K3Expert *w = k3_experts(c, inst, K3_MOE_UP_MXFP4_W);
    const int round = k3_flag(inst, K3_MOE_UP_MXFP4_ROUND); /* then z holds bf16 values */
    uint32_t t, s;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t *ids = k3_words(c, inst, K3_MOE_UP_MXFP4_ROUTE) + 2u * (uint64_t)top_k * t;
        const float *z = k3_in(c, inst, K3_MOE_UP_MXFP4_Z) + (uint64_t)t * K;
        float *y = k3_out(c, inst, K3_MOE_UP_MXFP4_Y) + (uint64_t)t * inst->width;
        for (s = 0; s < top_k; s++)
            k3_linear_mxfp4(c, w[ids[s]].packed, w[ids[s]].scale, u0, u1, K, z, y + (uint64_t)s * inst->n_units,
                            inst->n_units, round);
        for (s = 0; s < top_k; s++)
            k3_round_columns(c, y + (uint64_t)s * inst->n_units, inst->n_units, u0, u1, 1u, round);
    }
}

#endif

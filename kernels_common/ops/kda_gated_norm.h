/* y = ((o * inv) * norm) * sigmoid(gate) per head, inv = 1 / sqrt(ss / unit_cols + eps).
 *
 * Norm first, then a plain sigmoid (not SiLU). Layout: o, gate, y f32 [T][heads * unit_cols], norm f32
 * [unit_cols]. Unit: head. Reads o, norm, gate; writes y. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_KDA_GATED_NORM_H
#define K3_OP_KDA_GATED_NORM_H

#include "rmsnorm.h"

/* One head of one token. */
K3_FN void k3_gated_head(K3Ctx *c, const float *o, const float *norm, const float *gate, uint32_t D, float eps, float *y,
                         uint32_t token, int round) {
    const float inv = k3_inverse_rms(c, o, D, eps, token);
    K3_FOR(j, 0, D) { y[j] = k3_rnd(((o[j] * inv) * norm[j]) * k3_sigmoid(gate[j]), round); }
}

K3_FN void k3_op_kda_gated_norm(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols;
    const float *norm = k3_in(c, inst, K3_KDA_GATED_NORM_NORM);
    uint32_t t, h;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            k3_gated_head(c, k3_in(c, inst, K3_KDA_GATED_NORM_O) + at, norm,
                          k3_in(c, inst, K3_KDA_GATED_NORM_GATE) + at, D, k3_f32_param(inst, K3_KDA_GATED_NORM_EPS),
                          k3_out(c, inst, K3_KDA_GATED_NORM_Y) + at, t, k3_flag(inst, K3_KDA_GATED_NORM_ROUND));
        }
}

#endif

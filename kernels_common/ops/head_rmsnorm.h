/* y = (x * inv) * norm per head of unit_cols, inv = 1 / sqrt(ss / unit_cols + eps).
 *
 * Layout: x, y f32 [T][heads * unit_cols], norm f32 [unit_cols], one for all heads. Unit: head.
 * Reads x, norm; writes y. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_HEAD_RMSNORM_H
#define K3_OP_HEAD_RMSNORM_H

#include "rmsnorm.h"

K3_FN void k3_op_head_rmsnorm(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols;
    const float *norm = k3_in(c, inst, K3_HEAD_RMSNORM_NORM);
    uint32_t t, h;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            const float *x = k3_in(c, inst, K3_HEAD_RMSNORM_X) + at;
            float *y = k3_out(c, inst, K3_HEAD_RMSNORM_Y) + at;
            const float inv = k3_inverse_rms(c, x, D, k3_f32_param(inst, K3_HEAD_RMSNORM_EPS), t);
            K3_FOR(j, 0, D) { y[j] = (x[j] * inv) * norm[j]; }
        }
}

#endif

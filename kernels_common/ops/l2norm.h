/* y = x * (1 / sqrt(sum x^2 + eps)) per head of unit_cols. eps is on the sum, not on the mean.
 *
 * Layout: x, y f32 [T][heads * unit_cols]. Unit: head. Reads x; writes y.
 * Fault: NONFINITE, detail = token. */
#ifndef K3_OP_L2NORM_H
#define K3_OP_L2NORM_H

#include "body.h"

K3_FN float k3_inverse_length(K3Ctx *c, const float *x, uint32_t n, float eps, uint32_t token) {
    const float ss = k3_axis_dot(c, x, x, n);
    k3_check_finite(c, ss, token);
    return 1.0f / k3_sqrt(ss + eps);
}

K3_FN void k3_op_l2norm(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols;
    const float eps = k3_f32_param(inst, K3_L2NORM_EPS);
    uint32_t t, h;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            const float *x = k3_in(c, inst, K3_L2NORM_X) + at;
            float *y = k3_out(c, inst, K3_L2NORM_Y) + at;
            const float inv = k3_inverse_length(c, x, D, eps, t);
            K3_FOR(j, 0, D) { y[j] = x[j] * inv; }
        }
}

#endif

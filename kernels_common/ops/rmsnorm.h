/* y = (x * inv) * norm, both products rounded if flagged, inv = 1 / sqrt(ss / width + eps), ss by rule 6.
 *
 * Layout: x, y f32 [T][width], norm bf16 [width]. Unit: token. Wrong: eps outside the root; x * (inv * norm).
 * Reads x, norm; writes y. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_RMSNORM_H
#define K3_OP_RMSNORM_H

#include "body.h"

/* 1 / sqrt(mean square + eps) of n elements, with rule 8's check. */
K3_FN float k3_inverse_rms(K3Ctx *c, const float *x, uint32_t n, float eps, uint32_t detail) {
    const float ss = k3_axis_dot(c, x, x, n);
    k3_check_finite(c, ss, detail);
    return 1.0f / k3_sqrt(ss / (float)n + eps);
}

/* One token. y may be x. */
K3_FN void k3_rmsnorm_row(K3Ctx *c, const float *x, const uint16_t *norm, uint32_t n, float eps, float *y,
                          uint32_t token, int round) {
    const float inv = k3_inverse_rms(c, x, n, eps, token);
    K3_SYNC(c); /* where y is x: all lanes have summed it */
    K3_FOR(j, 0, n) { y[j] = k3_rnd(k3_rnd(x[j] * inv, round) * k3_bf16_to_f32(norm[j]), round); }
}

K3_FN void k3_op_rmsnorm(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t n = inst->width;
    uint32_t t;
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++)
        k3_rmsnorm_row(c, k3_in(c, inst, K3_RMSNORM_X) + (uint64_t)t * n, k3_bf16(c, inst, K3_RMSNORM_NORM), n,
                       k3_f32_param(inst, K3_RMSNORM_EPS), k3_out(c, inst, K3_RMSNORM_Y) + (uint64_t)t * n, t,
                       k3_flag(inst, K3_RMSNORM_ROUND));
}

#endif

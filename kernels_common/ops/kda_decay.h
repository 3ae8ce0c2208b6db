/* y = exp(lower_bound * sigmoid(A * (f + dt_bias))), A = exp(a_log[head]): what each channel of the state keeps.
 *
 * One a_log a head, not a channel; a bounded sigmoid, not a clamp on a softplus. Layout: f, y f32
 * [T][heads * unit_cols], a_log f32 [>= heads], dt_bias f32 [heads * unit_cols]. Unit: head.
 * Reads f, a_log, dt_bias; writes y. */
#ifndef K3_OP_KDA_DECAY_H
#define K3_OP_KDA_DECAY_H

#include "body.h"

K3_FN float k3_decay(float f, float dt, float A, float lower_bound) {
    const float g = lower_bound * k3_sigmoid(A * (f + dt));
    return k3_exp(g);
}

K3_FN void k3_op_kda_decay(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols;
    const float *a_log = k3_in(c, inst, K3_KDA_DECAY_A_LOG), *dt = k3_in(c, inst, K3_KDA_DECAY_DT_BIAS);
    const float lower_bound = k3_f32_param(inst, K3_KDA_DECAY_LOWER_BOUND);
    uint32_t t, h;
    for (t = 0; t < c->step->n_tokens; t++) {
        const float *f = k3_in(c, inst, K3_KDA_DECAY_F) + (uint64_t)t * inst->width;
        float *y = k3_out(c, inst, K3_KDA_DECAY_Y) + (uint64_t)t * inst->width;
        for (h = u0; h < u1; h++) {
            const float A = k3_exp(a_log[h]);
            K3_FOR(j, h * D, (h + 1u) * D) { y[j] = k3_decay(f[j], dt[j], A, lower_bound); }
        }
    }
}

#endif

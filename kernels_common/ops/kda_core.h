/* y = kda_step((q inv_q) q_scale, k inv_k, v, kda_decay(f), sigmoid(b)), inv = 1 / sqrt(sum of squares + l2_eps).
 *
 * q_scale multiplies after the norm; q * (inv_q * q_scale) has other bits. Layout: q, k, v, f, y f32
 * [T][heads * D], b f32 [T][heads], a_log, dt_bias as kda_decay.h, s as kda_step.h. Unit: head.
 * Reads all; writes y, s. Scratch: 5 D. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_KDA_CORE_H
#define K3_OP_KDA_CORE_H

#include "kda_decay.h"
#include "kda_step.h"
#include "l2norm.h"

/* Head h of token t into qn, kn and decay, D floats each. */
K3_FN void k3_kda_prepare(K3Ctx *c, const K3Inst *inst, uint32_t t, uint32_t h, float *K3_RESTRICT qn,
                          float *K3_RESTRICT kn, float *K3_RESTRICT decay) {
    const uint32_t D = inst->unit_cols;
    const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
    const float *q = k3_in(c, inst, K3_KDA_CORE_Q) + at, *k = k3_in(c, inst, K3_KDA_CORE_K) + at;
    const float *f = k3_in(c, inst, K3_KDA_CORE_F) + at;
    const float *dt = k3_in(c, inst, K3_KDA_CORE_DT_BIAS) + (uint64_t)h * D;
    const float eps = k3_f32_param(inst, K3_KDA_CORE_L2_EPS), scale = k3_f32_param(inst, K3_KDA_CORE_Q_SCALE);
    const float lower_bound = k3_f32_param(inst, K3_KDA_CORE_LOWER_BOUND);
    const float inv_q = k3_inverse_length(c, q, D, eps, t), inv_k = k3_inverse_length(c, k, D, eps, t);
    const float A = k3_exp(k3_in(c, inst, K3_KDA_CORE_A_LOG)[h]);
    K3_FOR(j, 0, D) {
        qn[j] = (q[j] * inv_q) * scale;
        kn[j] = k[j] * inv_k;
        decay[j] = k3_decay(f[j], dt[j], A, lower_bound);
    }
    K3_SYNC(c);
}

K3_FN void k3_op_kda_core(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols, heads = inst->n_units;
    float *work = k3_scratch(c, 5u * (uint64_t)D);
    K3Delta d;
    uint32_t t, h;
    if (!work) return;
    d.D = D;
    d.q = work + 2u * (uint64_t)D;
    d.k = work + 3u * (uint64_t)D;
    d.decay = work + 4u * (uint64_t)D;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            k3_kda_prepare(c, inst, t, h, work + 2u * (uint64_t)D, work + 3u * (uint64_t)D,
                           work + 4u * (uint64_t)D);
            d.v = k3_in(c, inst, K3_KDA_CORE_V) + at;
            d.beta = k3_sigmoid(k3_in(c, inst, K3_KDA_CORE_B)[(uint64_t)t * heads + h]);
            k3_delta_step(c, &d, k3_delta_state(c, inst, K3_KDA_CORE_S, t, h), work,
                          k3_out(c, inst, K3_KDA_CORE_Y) + at, c->step->position[t] == 0u);
            K3_SYNC(c); /* the next head overwrites work */
        }
}

#endif

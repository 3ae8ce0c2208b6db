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

typedef struct K3Head {
    const float *q, *k, *f, *dt; /* one head of one token, [D]; dt of the head */
    float a_log, l2_eps, q_scale, lower_bound;
    uint32_t D;
} K3Head;

/* Into qn, kn and decay, D floats each. They may be q, k and f: a lane owns its channels. */
K3_FN void k3_kda_prepare(K3Ctx *c, const K3Head *m, float *qn, float *kn, float *decay, uint32_t token) {
    const float inv_q = k3_inverse_length(c, m->q, m->D, m->l2_eps, token);
    const float inv_k = k3_inverse_length(c, m->k, m->D, m->l2_eps, token);
    const float A = k3_exp(m->a_log);
    K3_SYNC(c); /* where qn is q: all lanes have summed it */
    K3_FOR(j, 0, m->D) {
        qn[j] = (m->q[j] * inv_q) * m->q_scale;
        kn[j] = m->k[j] * inv_k;
        decay[j] = k3_decay(m->f[j], m->dt[j], A, m->lower_bound);
    }
    K3_SYNC(c);
}

K3_FN void k3_op_kda_core(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols, heads = inst->n_units;
    float *work = k3_scratch(c, 5u * (uint64_t)D);
    K3Delta d;
    K3Head m;
    uint32_t t, h;
    if (!work) return;
    m.D = d.D = D;
    d.round = k3_flag(inst, K3_KDA_CORE_ROUND);
    m.l2_eps = k3_f32_param(inst, K3_KDA_CORE_L2_EPS);
    m.q_scale = k3_f32_param(inst, K3_KDA_CORE_Q_SCALE);
    m.lower_bound = k3_f32_param(inst, K3_KDA_CORE_LOWER_BOUND);
    d.q = work + 2u * (uint64_t)D;
    d.k = work + 3u * (uint64_t)D;
    d.decay = work + 4u * (uint64_t)D;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            m.q = k3_in(c, inst, K3_KDA_CORE_Q) + at;
            m.k = k3_in(c, inst, K3_KDA_CORE_K) + at;
            m.f = k3_in(c, inst, K3_KDA_CORE_F) + at;
            m.dt = k3_in(c, inst, K3_KDA_CORE_DT_BIAS) + (uint64_t)h * D;
            m.a_log = k3_in(c, inst, K3_KDA_CORE_A_LOG)[h];
            k3_kda_prepare(c, &m, work + 2u * (uint64_t)D, work + 3u * (uint64_t)D, work + 4u * (uint64_t)D, t);
            d.v = k3_in(c, inst, K3_KDA_CORE_V) + at;
            d.beta = k3_sigmoid(k3_in(c, inst, K3_KDA_CORE_B)[(uint64_t)t * heads + h]);
            k3_delta_step(c, &d, k3_delta_state(c, inst, K3_KDA_CORE_S, t, h), work,
                          k3_out(c, inst, K3_KDA_CORE_Y) + at, c->step->position[t] == 0u);
            K3_SYNC(c); /* the next head overwrites work */
        }
}

#endif

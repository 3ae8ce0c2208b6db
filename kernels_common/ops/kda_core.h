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

/* Into qn, kn and decay, D floats each. They are q, k and f, or none of them. */
K3_FN void k3_kda_prepare(K3Ctx *c, const K3Head *m, float *qn, float *kn, float *decay, uint32_t token) {
    const float *q = m->q, *k = m->k, *f = m->f, *dt = m->dt;
    const float q_scale = m->q_scale, lower_bound = m->lower_bound;
    const uint32_t D = m->D;
    const float inv_q = k3_inverse_length(c, m->q, m->D, m->l2_eps, token);
    const float inv_k = k3_inverse_length(c, m->k, m->D, m->l2_eps, token);
    const float A = k3_exp(m->a_log);
    K3_SYNC(c); /* where qn is q: all lanes have summed it */
    if (decay == f) { /* the same loops, so that a compiler need not ask what overlaps */
        K3_FOR(j, 0, D) { qn[j] = (qn[j] * inv_q) * q_scale; }
        K3_FOR(j, 0, D) { kn[j] = kn[j] * inv_k; }
        K3_FOR(j, 0, D) { decay[j] = k3_decay(decay[j], dt[j], A, lower_bound); }
    } else {
        K3_FOR(j, 0, D) { qn[j] = (q[j] * inv_q) * q_scale; }
        K3_FOR(j, 0, D) { kn[j] = k[j] * inv_k; }
        K3_FOR(j, 0, D) { decay[j] = k3_decay(f[j], dt[j], A, lower_bound); }
    }
    K3_SYNC(c);
}

/* One head of one token as the instruction has it. */
K3_FN K3Head k3_core_head(const K3Ctx *c, const K3Inst *inst, uint32_t t, uint32_t h) {
    const uint32_t D = inst->unit_cols;
    const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
    K3Head m;
    m.D = D;
    m.l2_eps = k3_f32_param(inst, K3_KDA_CORE_L2_EPS);
    m.q_scale = k3_f32_param(inst, K3_KDA_CORE_Q_SCALE);
    m.lower_bound = k3_f32_param(inst, K3_KDA_CORE_LOWER_BOUND);
    m.q = k3_in(c, inst, K3_KDA_CORE_Q) + at;
    m.k = k3_in(c, inst, K3_KDA_CORE_K) + at;
    m.f = k3_in(c, inst, K3_KDA_CORE_F) + at;
    m.dt = k3_in(c, inst, K3_KDA_CORE_DT_BIAS) + (uint64_t)h * D;
    m.a_log = k3_in(c, inst, K3_KDA_CORE_A_LOG)[h];
    return m;
}

K3_FN float k3_core_beta(const K3Ctx *c, const K3Inst *inst, uint32_t t, uint32_t h) {
    return k3_sigmoid(k3_in(c, inst, K3_KDA_CORE_B)[(uint64_t)t * inst->n_units + h]);
}

/* One head of one token; work: 5 D floats. */
K3_FN void k3_core_token(K3Ctx *c, const K3Inst *inst, uint32_t t, uint32_t h, float *work) {
    const uint32_t D = inst->unit_cols;
    const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
    float *q = work + 2u * (uint64_t)D, *k = q + D, *decay = k + D;
    const K3Head m = k3_core_head(c, inst, t, h);
    const K3Delta d = {q, k, k3_in(c, inst, K3_KDA_CORE_V) + at, decay, k3_core_beta(c, inst, t, h), D,
                       k3_flag(inst, K3_KDA_CORE_ROUND)};
    k3_kda_prepare(c, &m, q, k, decay, t);
    k3_delta_step(c, &d, k3_delta_state(c, inst, K3_KDA_CORE_S, t, h), work, k3_out(c, inst, K3_KDA_CORE_Y) + at,
                  c->step->position[t] == 0u);
    K3_SYNC(c); /* the next head overwrites work */
}

#ifdef K3_DELTA_LEAF
#define K3_RUN_TOKENS 32u /* tokens of a sequence that a head takes at a time */
#define K3_RUN_WIDTH 128u

/* One head of n tokens of a sequence; 0, with nothing done, where the leaf has no such width. */
K3_FN int k3_core_run(K3Ctx *c, const K3Inst *inst, uint32_t t0, uint32_t n, uint32_t h) {
    const uint32_t D = inst->unit_cols;
    const uint64_t at = (uint64_t)t0 * inst->width + (uint64_t)h * D;
    float q[K3_RUN_TOKENS][K3_RUN_WIDTH], k[K3_RUN_TOKENS][K3_RUN_WIDTH], decay[K3_RUN_TOKENS][K3_RUN_WIDTH], beta[K3_RUN_TOKENS];
    float *y = k3_out(c, inst, K3_KDA_CORE_Y) + at;
    uint32_t i;
    if (D > K3_RUN_WIDTH) return 0;
    for (i = 0; i < n; i++) {
        const K3Head m = k3_core_head(c, inst, t0 + i, h);
        k3_kda_prepare(c, &m, q[i], k[i], decay[i], t0 + i);
        beta[i] = k3_core_beta(c, inst, t0 + i, h);
    }
    if (!k3_delta_tokens_f32(c, k3_delta_state(c, inst, K3_KDA_CORE_S, t0, h), D, n, q[0], k[0], decay[0], K3_RUN_WIDTH,
                             k3_in(c, inst, K3_KDA_CORE_V) + at, inst->width, beta, c->step->position[t0] == 0u, y, inst->width))
        return 0;
    k3_round_columns(c, y, inst->width, 0u, D, n, k3_flag(inst, K3_KDA_CORE_ROUND));
    return 1;
}
#endif

K3_FN void k3_op_kda_core(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    float *work = k3_scratch(c, 5u * (uint64_t)inst->unit_cols);
    uint32_t t, n, h, i;
    if (!work) return;
    for (t = 0; t < c->step->n_tokens; t += n) {
        n = 1u;
#ifdef K3_DELTA_LEAF
        n = k3_run_of(c->step, t, K3_RUN_TOKENS);
#endif
        for (h = u0; h < u1; h++) {
#ifdef K3_DELTA_LEAF
            if (n > 1u && k3_core_run(c, inst, t, n, h)) continue;
#endif
            for (i = 0; i < n; i++) k3_core_token(c, inst, t + i, h, work);
        }
    }
}

#endif

/* The delta rule, token by token in time order, per head with state S [D][D]:
 *
 *   S_ij <- a_i S_ij;  u_j = v_j - sum_i k_i S_ij;  S_ij <- fma(k_i, beta u_j, S_ij);  y_j = sum_i q_i S_ij
 *
 * Both sums by rule 3 over i. Decay before the prediction; y from the updated state. Layout: q, k, v, decay, y
 * f32 [T][heads * D], beta f32 [T][heads], s f32 [slots][heads][D][D], row i the key's, column j the value's.
 * Unit: head, unit_cols = D. Reads all; writes y, s. Scratch: 2 D. Position 0 takes S as +0. */
#ifndef K3_OP_KDA_STEP_H
#define K3_OP_KDA_STEP_H

#include "body.h"

typedef struct K3Delta {
    const float *q, *k, *v, *decay; /* one head of one token */
    float beta;
    uint32_t D;
    int round; /* y is behind a rounding point; the state never is */
} K3Delta;

/* work: 2 D floats. */
K3_FN void k3_delta_step(K3Ctx *c, const K3Delta *d, float *S, float *work, float *y, int first) {
    const uint32_t D = d->D;
    float *K3_RESTRICT predicted = work;
    float *K3_RESTRICT update = work + D;
    uint32_t i;
#ifdef K3_DELTA_LEAF
    if (k3_delta_f32(c, S, D, d->q, d->k, d->v, d->decay, d->beta, first, y)) {
        k3_round_columns(c, y, D, 0u, D, 1u, d->round);
        return;
    }
#endif
    for (i = 0; i < D; i++) {
        float *K3_RESTRICT row = S + (uint64_t)i * D;
        const float a = d->decay[i];
        K3_FOR(j, 0, D) { row[j] = a * (first ? 0.0f : row[j]); }
    }
    K3_SYNC(c);
    k3_cols_dot_f32(c, S, D, D, 0u, D, d->k, predicted);
    K3_SYNC(c);
    K3_FOR(j, 0, D) { update[j] = d->beta * (d->v[j] - predicted[j]); }
    K3_SYNC(c);
    for (i = 0; i < D; i++) {
        float *K3_RESTRICT row = S + (uint64_t)i * D;
        const float k = d->k[i];
        K3_FOR(j, 0, D) { row[j] = k3_fma(k, update[j], row[j]); }
    }
    K3_SYNC(c);
    k3_cols_dot_f32(c, S, D, D, 0u, D, d->q, y);
    k3_round_columns(c, y, D, 0u, D, 1u, d->round);
}

K3_FN float *k3_delta_state(const K3Ctx *c, const K3Inst *inst, uint32_t slot, uint32_t token, uint32_t head) {
    const uint64_t of_head = (uint64_t)inst->unit_cols * inst->unit_cols;
    return (float *)k3_tensor(c, inst, slot) + ((uint64_t)c->step->slot[token] * inst->n_units + head) * of_head;
}

K3_FN void k3_op_kda_step(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t D = inst->unit_cols, heads = inst->n_units;
    float *work = k3_scratch(c, 2u * (uint64_t)D);
    K3Delta d;
    uint32_t t, h;
    if (!work) return;
    d.D = D;
    d.round = k3_flag(inst, K3_KDA_STEP_ROUND);
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
            d.q = k3_in(c, inst, K3_KDA_STEP_Q) + at;
            d.k = k3_in(c, inst, K3_KDA_STEP_K) + at;
            d.v = k3_in(c, inst, K3_KDA_STEP_V) + at;
            d.decay = k3_in(c, inst, K3_KDA_STEP_DECAY) + at;
            d.beta = k3_in(c, inst, K3_KDA_STEP_BETA)[(uint64_t)t * heads + h];
            k3_delta_step(c, &d, k3_delta_state(c, inst, K3_KDA_STEP_S, t, h), work,
                          k3_out(c, inst, K3_KDA_STEP_Y) + at, c->step->position[t] == 0u);
            K3_SYNC(c); /* the next head overwrites work */
        }
}

#endif

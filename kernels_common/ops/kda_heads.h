/* Everything a head of Kimi delta attention does between the input projections and o_proj:
 *
 *   q, k, v = silu(short_conv(.)); f = rule 3 over f_b with f_a's output; o = kda_core; y = kda_gated_norm(o, gate)
 *
 * Heads share nothing, so there is no hand-off inside. Layout: q, k, v, gate, y f32 [T][heads * D], f f32 [T][rank], b
 * f32 [T][heads]; weights and states as in conv_silu.h, kda_core.h, kda_gated_norm.h, f_b bf16 [heads * D][rank]. Unit:
 * head. Reads all; writes y and the four states, token by token in time order. Scratch: 7 D. Fault: NONFINITE, detail =
 * token. */
#ifndef K3_OP_KDA_HEADS_H
#define K3_OP_KDA_HEADS_H

#include "conv_silu.h"
#include "kda_core.h"
#include "kda_gated_norm.h"

/* One head's channels of one of q, k, v. */
K3_FN void k3_head_conv(K3Ctx *c, const K3Inst *inst, uint32_t x, uint32_t conv, uint32_t taps, uint32_t t, uint32_t h,
                        float *y) {
    const uint32_t D = inst->unit_cols, width = inst->width;
    const int first = c->step->position[t] == 0u, round = k3_flag(inst, K3_KDA_HEADS_ROUND);
    k3_conv_channels(c, k3_in(c, inst, x) + (uint64_t)t * width, k3_in(c, inst, conv), k3_conv_taps(c, inst, taps, t), width,
                     h * D, h * D + D, first, y);
    K3_FOR(j, 0, D) { y[j] = k3_rnd(k3_silu(y[j]), round); }
}

/* One head of one token; work: 7 D floats. */
K3_FN void k3_kda_head(K3Ctx *c, const K3Inst *inst, K3Head *m, uint32_t t, uint32_t h, float *work) {
    const uint32_t D = inst->unit_cols, rank = inst->param[K3_KDA_HEADS_RANK];
    const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * D;
    float *q = work + 2u * (uint64_t)D, *k = q + D, *f = k + D, *v = f + D, *o = v + D;
    K3Delta d;
    d.round = k3_flag(inst, K3_KDA_HEADS_ROUND);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_KDA_HEADS_F_B) + (uint64_t)h * D * rank, rank, 0u, D, rank, 1u,
                   k3_in(c, inst, K3_KDA_HEADS_F) + (uint64_t)t * rank, rank, 1u, f, D, d.round);
    k3_round_columns(c, f, D, 0u, D, 1u, d.round);
    k3_head_conv(c, inst, K3_KDA_HEADS_Q, K3_KDA_HEADS_CONV_Q, K3_KDA_HEADS_TAPS_Q, t, h, q);
    k3_head_conv(c, inst, K3_KDA_HEADS_K, K3_KDA_HEADS_CONV_K, K3_KDA_HEADS_TAPS_K, t, h, k);
    k3_head_conv(c, inst, K3_KDA_HEADS_V, K3_KDA_HEADS_CONV_V, K3_KDA_HEADS_TAPS_V, t, h, v);
    K3_SYNC(c);
    m->q = q;
    m->k = k;
    m->f = f;
    m->dt = k3_in(c, inst, K3_KDA_HEADS_DT_BIAS) + (uint64_t)h * D;
    m->a_log = k3_in(c, inst, K3_KDA_HEADS_A_LOG)[h];
    k3_kda_prepare(c, m, q, k, f, t);
    d.D = D;
    d.q = q;
    d.k = k;
    d.v = v;
    d.decay = f;
    d.beta = k3_sigmoid(k3_in(c, inst, K3_KDA_HEADS_B)[(uint64_t)t * inst->n_units + h]);
    k3_delta_step(c, &d, k3_delta_state(c, inst, K3_KDA_HEADS_S, t, h), work, o, c->step->position[t] == 0u);
    K3_SYNC(c);
    k3_gated_head(c, o, k3_in(c, inst, K3_KDA_HEADS_O_NORM), k3_in(c, inst, K3_KDA_HEADS_GATE) + at, D,
                  k3_f32_param(inst, K3_KDA_HEADS_EPS), k3_out(c, inst, K3_KDA_HEADS_Y) + at, t, d.round);
    K3_SYNC(c); /* the next head overwrites work */
}

K3_FN void k3_op_kda_heads(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    float *work = k3_scratch(c, 7u * (uint64_t)inst->unit_cols);
    K3Head m;
    uint32_t t, h;
    if (!work) return;
    m.D = inst->unit_cols;
    m.l2_eps = k3_f32_param(inst, K3_KDA_HEADS_L2_EPS);
    m.q_scale = k3_f32_param(inst, K3_KDA_HEADS_Q_SCALE);
    m.lower_bound = k3_f32_param(inst, K3_KDA_HEADS_LOWER_BOUND);
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) k3_kda_head(c, inst, &m, t, h, work);
}

#endif

/* Choose top_k experts a token by sigmoid(logit) + bias (descending, then the lower id); weigh by the sigmoid alone.
 *
 *   ids ascending; w = (s / (sum + 1e-20)) * scale, sum the rule-3 plain sum over the chosen in that order
 *
 * The bias never enters a weight. Comparisons are binary32 ones, so -0 equals +0. Layout: logits f32
 * [T][n_experts], bias f32 [n_experts], y [T][2 top_k]: ids as u32, then weights f32. Unit: token.
 * Reads logits, bias; writes y. Scratch: 3 n_experts + top_k. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_ROUTER_TOPK_H
#define K3_OP_ROUTER_TOPK_H

#include "body.h"

/* Whether fewer than top_k experts come before expert e. */
K3_FN int k3_expert_chosen(const float *choice, uint32_t n_experts, uint32_t top_k, uint32_t e) {
    const float own = choice[e];
    uint32_t j, before = 0;
    for (j = 0; j < n_experts; j++)
        before += (uint32_t)(choice[j] > own) | ((uint32_t)(choice[j] == own) & (uint32_t)(j < e));
    return before < top_k;
}

/* Into chosen: 1 for the top_k experts of the greatest choice (of equal ones the lower ids), else 0. */
#ifdef K3_ONE_LANE
/* Comparing each with each costs n_experts squared, which one lane has to do alone, in every slice: the choice that
 * top_k experts reach is bisected in 32 counts instead. Keys order as the choices do; + 0 makes -0 into +0. */
K3_FN void k3_choose_experts(K3Ctx *c, const float *choice, uint32_t n_experts, uint32_t top_k, uint32_t *chosen) {
    uint32_t *key = chosen; /* until the last loop */
    uint32_t least = 0u, bit, e, above = 0u, equal;
    (void)c;
    for (e = 0; e < n_experts; e++) {
        const uint32_t u = k3_f32_to_bits(choice[e] + 0.0f);
        key[e] = u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
    }
    for (bit = 0x80000000u; bit != 0u; bit >>= 1) { /* the greatest key that at least top_k experts reach */
        const uint32_t tried = least | bit;
        uint32_t n = 0;
        for (e = 0; e < n_experts; e++) n += key[e] >= tried;
        if (n >= top_k) least = tried;
    }
    for (e = 0; e < n_experts; e++) above += key[e] > least;
    equal = top_k - above;
    for (e = 0; e < n_experts; e++) {
        const uint32_t is_equal = key[e] == least;
        const int is_chosen = key[e] > least || (is_equal && equal > 0u);
        equal -= is_equal && equal > 0u;
        chosen[e] = (uint32_t)is_chosen;
    }
}
#else
K3_FN void k3_choose_experts(K3Ctx *c, const float *choice, uint32_t n_experts, uint32_t top_k, uint32_t *chosen) {
    (void)c;
    K3_FOR(e, 0, n_experts) { chosen[e] = (uint32_t)k3_expert_chosen(choice, n_experts, top_k, e); }
}
#endif

typedef struct K3Router {
    const float *logits, *bias; /* logits of token 0 */
    uint32_t n_experts, top_k;
    float scale;
} K3Router;

/* One token. work: 3 n_experts + top_k floats. */
K3_FN void k3_route_row(K3Ctx *c, const K3Router *m, float *work, uint32_t *route, uint32_t token) {
    const uint32_t E = m->n_experts, top_k = m->top_k;
    const float *logits = m->logits + (uint64_t)token * E, *bias = m->bias;
    const float scale = m->scale;
    float *choice = work, *score = work + E, *picked = work + 3u * (uint64_t)E;
    uint32_t *chosen = (uint32_t *)(work + 2u * (uint64_t)E);
    float *weight = (float *)(route + top_k);
    float sum;
    K3_FOR(e, 0, E) {
        score[e] = k3_sigmoid(logits[e]);
        choice[e] = score[e] + bias[e];
    }
    K3_FOR(e, 0, E) { /* by itself: the sums above are computed several at a time */
        k3_check_finite(c, logits[e], token);
        k3_check_finite(c, choice[e], token);
    }
    K3_SYNC(c);
    k3_choose_experts(c, choice, E, top_k, chosen);
    K3_SYNC(c);
    if (K3_LANE0) {
        uint32_t e, n = 0;
        for (e = 0; e < E && n < top_k; e++)
            if (chosen[e] != 0u) {
                route[n] = e;
                picked[n] = score[e];
                n++;
            }
        for (; n < top_k; n++) route[n] = 0u, picked[n] = 0.0f; /* only after a NaN, which has trapped */
    }
    K3_SYNC(c);
    sum = k3_sum_f32(c, picked, top_k) + 1e-20f;
    K3_FOR(i, 0, top_k) { weight[i] = (picked[i] / sum) * scale; }
}

/* Every token's route into the start of scratch, where an interpreter looks for it, for an op that needs `more` floats
 * behind; returns those floats, 0 and a fault where scratch is too small. */
K3_FN float *k3_route_in_scratch(K3Ctx *c, const K3Router *m, uint64_t more, const uint32_t **route) {
    const uint64_t routes = 2u * (uint64_t)c->step->n_tokens * m->top_k;
    float *work = k3_scratch(c, routes + 3u * (uint64_t)m->n_experts + m->top_k + more);
    uint32_t t;
    if (!work) return 0;
    for (t = 0; t < c->step->n_tokens; t++) {
        k3_route_row(c, m, work + routes, (uint32_t *)work + 2u * (uint64_t)m->top_k * t, t);
        K3_SYNC(c); /* the next token overwrites the scores */
    }
    *route = (const uint32_t *)work;
    return work + routes;
}

K3_FN void k3_op_router_topk(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t E = inst->param[K3_ROUTER_TOPK_N_EXPERTS], top_k = inst->param[K3_ROUTER_TOPK_TOP_K];
    float *work = k3_scratch(c, 3u * (uint64_t)E + top_k);
    uint32_t *y = (uint32_t *)k3_tensor(c, inst, K3_ROUTER_TOPK_Y);
    K3Router m;
    uint32_t t;
    if (!work) return;
    m.logits = k3_in(c, inst, K3_ROUTER_TOPK_LOGITS);
    m.bias = k3_in(c, inst, K3_ROUTER_TOPK_BIAS);
    m.n_experts = E;
    m.top_k = top_k;
    m.scale = k3_f32_param(inst, K3_ROUTER_TOPK_SCALE);
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++) {
        k3_route_row(c, &m, work, y + 2u * (uint64_t)top_k * t, t);
        K3_SYNC(c); /* the next token overwrites work */
    }
}

#endif

/* Choose the experts that moe_glu_topk and moe_down_topk will choose from the same scores, so that they can be fetched.
 *
 * The body leaves the routes at the start of its scratch; reading is the interpreter's (kernels_cpu/residency.c). Every
 * slice chooses alike and then takes its share of what is missing. It is done, for its counter, when every chosen expert has
 * a slot that nothing else can take; each expert's own pointer says when its bytes are whole (moe_union.h). Layout: router_topk.h. Unit: I/O worker. Reads scores,
 * bias; makes w1, w3, w2 of the chosen valid. Scratch: routes, then 3 n_experts + top_k. Fault: NONFINITE, detail =
 * token. */
#ifndef K3_OP_EXPERT_FETCH_H
#define K3_OP_EXPERT_FETCH_H

#include "router_topk.h"

K3_FN void k3_op_expert_fetch(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t *route;
    K3Router m;
    (void)u0;
    (void)u1;
    m.logits = k3_in(c, inst, K3_EXPERT_FETCH_SCORES);
    m.bias = k3_in(c, inst, K3_EXPERT_FETCH_BIAS);
    m.n_experts = inst->param[K3_EXPERT_FETCH_N_EXPERTS];
    m.top_k = inst->param[K3_EXPERT_FETCH_TOP_K];
    m.scale = 1.0f;
    (void)k3_route_in_scratch(c, &m, 0u, &route);
}

#endif

/* y = moe_glu_mxfp4(z, router_topk(scores; bias)): every slice chooses again, from a few kilobytes of scores.
 *
 * Only the choice matters here, so the weights' scale is no parameter. Layout: moe_glu_mxfp4.h, router_topk.h. Unit: row
 * of an expert. Reads z, scores, bias, w1, w3; writes y. Scratch: the routes at its start, then 3 n_experts + top_k, of
 * which the rows take over. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_MOE_GLU_TOPK_H
#define K3_OP_MOE_GLU_TOPK_H

#include "moe_glu_mxfp4.h"
#include "router_topk.h"

K3_FN void k3_op_moe_glu_topk(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t *route;
    float *work;
    K3Router router;
    K3Glu m;
    router.logits = k3_in(c, inst, K3_MOE_GLU_TOPK_SCORES);
    router.bias = k3_in(c, inst, K3_MOE_GLU_TOPK_BIAS);
    router.n_experts = inst->param[K3_MOE_GLU_TOPK_N_EXPERTS];
    router.top_k = inst->param[K3_MOE_GLU_TOPK_TOP_K];
    router.scale = 1.0f;
    work = k3_route_in_scratch(c, &router, K3_GLU_WORDS(c->step->n_tokens), &route);
    if (!work) return;
    m.w1 = k3_experts(c, inst, K3_MOE_GLU_TOPK_W1);
    m.w3 = k3_experts(c, inst, K3_MOE_GLU_TOPK_W3);
    m.z = k3_in(c, inst, K3_MOE_GLU_TOPK_Z);
    m.y = k3_out(c, inst, K3_MOE_GLU_TOPK_Y);
    m.K = inst->param[K3_MOE_GLU_TOPK_K];
    m.rows = inst->n_units;
    m.beta = k3_f32_param(inst, K3_MOE_GLU_TOPK_BETA);
    m.linear = k3_f32_param(inst, K3_MOE_GLU_TOPK_LINEAR_BETA);
    m.round = k3_flag(inst, K3_MOE_GLU_TOPK_ROUND);
    k3_experts_glu(c, &m, route, router.top_k, u0, u1, work);
}

#endif

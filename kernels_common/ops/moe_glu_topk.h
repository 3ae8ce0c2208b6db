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
    const uint32_t K = inst->param[K3_MOE_GLU_TOPK_K], top_k = inst->param[K3_MOE_GLU_TOPK_TOP_K];
    const K3Expert *w1 = k3_experts(c, inst, K3_MOE_GLU_TOPK_W1), *w3 = k3_experts(c, inst, K3_MOE_GLU_TOPK_W3);
    const uint32_t *route;
    float *work;
    K3Router m;
    uint32_t t, s;
    m.logits = k3_in(c, inst, K3_MOE_GLU_TOPK_SCORES);
    m.bias = k3_in(c, inst, K3_MOE_GLU_TOPK_BIAS);
    m.n_experts = inst->param[K3_MOE_GLU_TOPK_N_EXPERTS];
    m.top_k = top_k;
    m.scale = 1.0f;
    work = k3_route_in_scratch(c, &m, 2u * K3_TILE_ROWS, &route);
    if (!work) return;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t *ids = route + 2u * (uint64_t)top_k * t;
        const float *z = k3_in(c, inst, K3_MOE_GLU_TOPK_Z) + (uint64_t)t * K;
        float *y = k3_out(c, inst, K3_MOE_GLU_TOPK_Y) + (uint64_t)t * inst->width;
        for (s = 0; s < top_k; s++)
            k3_expert_glu(c, w1 + ids[s], w3 + ids[s], z, K, k3_f32_param(inst, K3_MOE_GLU_TOPK_BETA),
                          k3_f32_param(inst, K3_MOE_GLU_TOPK_LINEAR_BETA), u0, u1, work,
                          y + (uint64_t)s * inst->n_units, k3_flag(inst, K3_MOE_GLU_TOPK_ROUND));
    }
}

#endif

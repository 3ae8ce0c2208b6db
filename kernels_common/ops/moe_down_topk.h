/* y = moe_down_mxfp4(x, router_topk(scores; bias)): every slice chooses and weighs again.
 *
 * Layout: moe_down_mxfp4.h, router_topk.h. Unit: row. Reads x, scores, bias, w2; writes y. Scratch: the routes at its
 * start, then 3 n_experts + top_k, of which the rows take over. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_MOE_DOWN_TOPK_H
#define K3_OP_MOE_DOWN_TOPK_H

#include "moe_down_mxfp4.h"
#include "router_topk.h"

K3_FN void k3_op_moe_down_topk(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_MOE_DOWN_TOPK_K], top_k = inst->param[K3_MOE_DOWN_TOPK_TOP_K];
    const uint32_t *route;
    float *work;
    K3Router router;
    K3Combine m;
    uint32_t t, r;
    router.logits = k3_in(c, inst, K3_MOE_DOWN_TOPK_SCORES);
    router.bias = k3_in(c, inst, K3_MOE_DOWN_TOPK_BIAS);
    router.n_experts = inst->param[K3_MOE_DOWN_TOPK_N_EXPERTS];
    router.top_k = top_k;
    router.scale = k3_f32_param(inst, K3_MOE_DOWN_TOPK_SCALE);
    work = k3_route_in_scratch(c, &router, 16u * K3_TILE_ROWS, &route);
    if (!work) return;
    m.w2 = k3_experts(c, inst, K3_MOE_DOWN_TOPK_W2);
    m.K = K;
    m.x_bf16 = k3_flag(inst, K3_MOE_DOWN_TOPK_X_BF16);
    m.top_k = top_k;
    m.n_blocks = inst->param[K3_MOE_DOWN_TOPK_N_BLOCKS];
    for (t = 0; t < c->step->n_tokens; t++) {
        m.ids = route + 2u * (uint64_t)top_k * t;
        m.weight = (const float *)(m.ids + top_k);
        m.x = k3_in(c, inst, K3_MOE_DOWN_TOPK_X) + (uint64_t)t * top_k * K;
        for (r = u0; r < u1; r += K3_TILE_ROWS)
            k3_combine_rows(c, &m, r, k3_min(K3_TILE_ROWS, u1 - r), work,
                            k3_out(c, inst, K3_MOE_DOWN_TOPK_Y) + (uint64_t)t * inst->width);
    }
}

#endif

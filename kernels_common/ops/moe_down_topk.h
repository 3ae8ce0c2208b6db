/* y = moe_down_mxfp4(x, router_topk(scores; bias)): every slice chooses and weighs again.
 *
 * Layout: moe_down_mxfp4.h, router_topk.h. Unit: row. Reads x, scores, bias, w2; writes y. Scratch: the routes at its
 * start, then 3 n_experts + top_k, of which the rows take over. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_MOE_DOWN_TOPK_H
#define K3_OP_MOE_DOWN_TOPK_H

#include "moe_down_mxfp4.h"
#include "router_topk.h"

K3_FN void k3_op_moe_down_topk(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t n_blocks = inst->param[K3_MOE_DOWN_TOPK_N_BLOCKS];
    float *work;
    K3Router router;
    K3Combine m;
    router.logits = k3_in(c, inst, K3_MOE_DOWN_TOPK_SCORES);
    router.bias = k3_in(c, inst, K3_MOE_DOWN_TOPK_BIAS);
    router.n_experts = inst->param[K3_MOE_DOWN_TOPK_N_EXPERTS];
    router.top_k = inst->param[K3_MOE_DOWN_TOPK_TOP_K];
    router.scale = k3_f32_param(inst, K3_MOE_DOWN_TOPK_SCALE);
    work = k3_route_in_scratch(c, &router, K3_COMBINE_WORDS(c->step->n_tokens, n_blocks), &m.route);
    if (!work) return;
    m.w2 = k3_experts(c, inst, K3_MOE_DOWN_TOPK_W2);
    m.x = k3_in(c, inst, K3_MOE_DOWN_TOPK_X);
    m.y = k3_out(c, inst, K3_MOE_DOWN_TOPK_Y);
    m.K = inst->param[K3_MOE_DOWN_TOPK_K];
    m.top_k = router.top_k;
    m.n_blocks = n_blocks;
    m.width = inst->width;
    m.x_bf16 = k3_flag(inst, K3_MOE_DOWN_TOPK_X_BF16);
    k3_combine(c, &m, u0, u1, work);
}

#endif

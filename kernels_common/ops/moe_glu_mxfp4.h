/* y[t][s][r] = situ(rule 3 over w1[expert s][r] with z[t], rule 3 over w3[expert s][r] with z[t]).
 *
 * Layout: moe_up_mxfp4.h. Unit: row of an expert. Reads z, route, w1, w3; writes y. Scratch: 2 K3_TILE_ROWS. */
#ifndef K3_OP_MOE_GLU_MXFP4_H
#define K3_OP_MOE_GLU_MXFP4_H

#include "body.h"

/* Rows [u0, u1) of one expert for one token; y at the expert's first row. */
K3_FN void k3_expert_glu(K3Ctx *c, const K3Expert *w1, const K3Expert *w3, const float *z, uint32_t K, float beta,
                         float linear, uint32_t u0, uint32_t u1, float *work, float *y, int round) {
    float *g = work, *u = work + K3_TILE_ROWS;
    uint32_t r;
    for (r = u0; r < u1; r += K3_TILE_ROWS) {
        const uint32_t n = k3_min(K3_TILE_ROWS, u1 - r);
        const uint64_t packed = (uint64_t)r * (K / 2u), scale = (uint64_t)r * (K / K3_MX_GROUP);
        float *out = y + r;
        k3_linear_mxfp4(c, w1->packed + packed, w1->scale + scale, 0u, n, K, z, g, K3_TILE_ROWS, round);
        k3_linear_mxfp4(c, w3->packed + packed, w3->scale + scale, 0u, n, K, z, u, K3_TILE_ROWS, round);
        K3_SYNC(c);
        K3_FOR(j, 0, n) { out[j] = k3_rnd(k3_situ(k3_rnd(g[j], round), k3_rnd(u[j], round), beta, linear), round); }
        K3_SYNC(c); /* the next tile overwrites g and u */
    }
}

K3_FN void k3_op_moe_glu_mxfp4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_MOE_GLU_MXFP4_K], top_k = inst->param[K3_MOE_GLU_MXFP4_TOP_K];
    const K3Expert *w1 = k3_experts(c, inst, K3_MOE_GLU_MXFP4_W1);
    const K3Expert *w3 = k3_experts(c, inst, K3_MOE_GLU_MXFP4_W3);
    float *work = k3_scratch(c, 2u * K3_TILE_ROWS);
    uint32_t t, s;
    if (!work) return;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t *ids = k3_words(c, inst, K3_MOE_GLU_MXFP4_ROUTE) + 2u * (uint64_t)top_k * t;
        const float *z = k3_in(c, inst, K3_MOE_GLU_MXFP4_Z) + (uint64_t)t * K;
        float *y = k3_out(c, inst, K3_MOE_GLU_MXFP4_Y) + (uint64_t)t * inst->width;
        for (s = 0; s < top_k; s++)
            k3_expert_glu(c, w1 + ids[s], w3 + ids[s], z, K, k3_f32_param(inst, K3_MOE_GLU_MXFP4_BETA),
                          k3_f32_param(inst, K3_MOE_GLU_MXFP4_LINEAR_BETA), u0, u1, work,
                          y + (uint64_t)s * inst->n_units, k3_flag(inst, K3_MOE_GLU_MXFP4_ROUND));
    }
}

#endif

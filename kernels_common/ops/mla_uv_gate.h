/* y = mla_uv(ctx) * sigmoid(gate).
 *
 * Layout: mla_uv.h; gate f32 [T][width]. Unit: row. Reads ctx, kv_b, gate; writes y (and multiplies it in place). */
#ifndef K3_OP_MLA_UV_GATE_H
#define K3_OP_MLA_UV_GATE_H

#include "mla_uv.h"

K3_FN void k3_op_mla_uv_gate(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *K3_RESTRICT gate = k3_in(c, inst, K3_MLA_UV_GATE_GATE);
    float *K3_RESTRICT y = k3_out(c, inst, K3_MLA_UV_GATE_Y);
    const int round = k3_flag(inst, K3_MLA_UV_GATE_ROUND);
    uint32_t t;
    k3_uv_columns(c, k3_in(c, inst, K3_MLA_UV_GATE_CTX), k3_bf16(c, inst, K3_MLA_UV_GATE_KV_B),
                  inst->param[K3_MLA_UV_GATE_NOPE], inst->param[K3_MLA_UV_GATE_V],
                  inst->param[K3_MLA_UV_GATE_LATENT], inst->width, u0, u1, y, round);
    K3_SYNC(c);
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t row = (uint64_t)t * inst->width;
        K3_FOR(j, u0, u1) { y[row + j] = k3_rnd(y[row + j] * k3_rnd(k3_sigmoid(gate[row + j]), round), round); }
    }
}

#endif

/* y[t][h * v + i] = rule 3 over W_UV[h][i] with ctx[t][h]: the value half of kv_b, by rows.
 *
 * Layout: ctx f32 [T][heads * latent]; kv_b bf16 [heads * (nope + v)][latent], a head's value rows after its key
 * rows; y f32 [T][heads * v]. Unit: row, a column of y; a slice may begin inside a head. Reads ctx, kv_b;
 * writes y. */
#ifndef K3_OP_MLA_UV_H
#define K3_OP_MLA_UV_H

#include "body.h"

/* Columns [u0, u1) of y. */
K3_FN void k3_uv_columns(K3Ctx *c, const float *ctx, const uint16_t *kv_b, uint32_t nope, uint32_t v,
                         uint32_t latent, uint32_t width, uint32_t u0, uint32_t u1, float *y, int round) {
    const uint64_t ctx_width = (uint64_t)(width / v) * latent;
    uint32_t u, end;
    for (u = u0; u < u1; u = end) {
        const uint32_t h = u / v;
        const uint16_t *W_UV = kv_b + ((uint64_t)h * (nope + v) + nope) * latent;
        end = k3_min(u1, (h + 1u) * v);
        k3_linear_bf16(c, W_UV, latent, u - h * v, end - h * v, latent, 1u, ctx + (uint64_t)h * latent, ctx_width,
                       c->step->n_tokens, y + (uint64_t)h * v, width, round);
    }
    k3_round_columns(c, y, width, u0, u1, c->step->n_tokens, round);
}

K3_FN void k3_op_mla_uv(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    k3_uv_columns(c, k3_in(c, inst, K3_MLA_UV_CTX), k3_bf16(c, inst, K3_MLA_UV_KV_B),
                  inst->param[K3_MLA_UV_NOPE], inst->param[K3_MLA_UV_V], inst->param[K3_MLA_UV_LATENT], inst->width,
                  u0, u1, k3_out(c, inst, K3_MLA_UV_Y), k3_flag(inst, K3_MLA_UV_ROUND));
}

#endif

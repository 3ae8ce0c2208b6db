/* Everything a head of latent attention does between q_b and o_proj: y = mla_uv_gate(mla_attend(mla_qlat(q)), gate).
 *
 * Heads share only the cache, which is read. Layout: q f32 [T][heads * (nope + rope)], gate, y f32 [T][heads * v];
 * kv_b and cache as in mla_qlat.h, mla_uv.h and mla_attend.h. Unit: head. Reads q, kv_b, cache, gate, the page table;
 * writes y. Scratch: 256 + 4 latent + rope. Fault: RANGE, detail = token. */
#ifndef K3_OP_MLA_HEADS_H
#define K3_OP_MLA_HEADS_H

#include "mla_attend.h"
#include "mla_qlat.h"

K3_FN void k3_op_mla_heads(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t nope = inst->param[K3_MLA_HEADS_NOPE], rope = inst->param[K3_MLA_HEADS_ROPE];
    const uint32_t latent = inst->param[K3_MLA_HEADS_LATENT], v = inst->param[K3_MLA_HEADS_V];
    const uint64_t q_width = (uint64_t)inst->n_units * (nope + rope);
    float *work = k3_scratch(c, K3_PAGE_TOKENS + 4u * (uint64_t)latent + rope);
    float *ctx = work + K3_PAGE_TOKENS + 2u * (uint64_t)latent;
    float *ql = ctx + latent;
    K3Softmax a;
    const int round = k3_flag(inst, K3_MLA_HEADS_ROUND);
    uint32_t t, h;
    if (!work) return;
    k3_attend_begin(&a, work, k3_in(c, inst, K3_MLA_HEADS_CACHE), latent, rope, k3_f32_param(inst, K3_MLA_HEADS_SCALE),
                    round);
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t)) return;
        for (h = u0; h < u1; h++) {
            const uint16_t *W_UK = k3_bf16(c, inst, K3_MLA_HEADS_KV_B) + (uint64_t)h * (nope + v) * latent;
            const float *q = k3_in(c, inst, K3_MLA_HEADS_Q) + t * q_width + (uint64_t)h * (nope + rope);
            const float *gate = k3_in(c, inst, K3_MLA_HEADS_GATE) + (uint64_t)t * inst->width + (uint64_t)h * v;
            float *y = k3_out(c, inst, K3_MLA_HEADS_Y) + (uint64_t)t * inst->width + (uint64_t)h * v;
            k3_qlat_head(c, q, W_UK, nope, rope, latent, ql, round);
            K3_SYNC(c);
            k3_attend_head(c, &a, t, ql, ctx);
            K3_SYNC(c);
            k3_linear_bf16(c, W_UK + (uint64_t)nope * latent, latent, 0u, v, latent, 1u, ctx, latent, 1u, y, v, round);
            k3_round_columns(c, y, v, 0u, v, 1u, round);
            K3_SYNC(c);
            K3_FOR(j, 0, v) { y[j] = k3_rnd(y[j] * k3_rnd(k3_sigmoid(gate[j]), round), round); }
            K3_SYNC(c); /* the next head overwrites work */
        }
    }
}

#endif

/* Everything a head of latent attention does between q_b and o_proj: y = mla_uv_gate(mla_attend(mla_qlat(q)), gate).
 *
 * Heads share only the cache, which is read. Layout: q f32 [T][heads * (nope + rope)], gate, y f32 [T][heads * v];
 * kv_b and cache as in mla_qlat.h, mla_uv.h and mla_attend.h. Unit: head. Reads q, kv_b, cache, gate, the page table;
 * writes y. Four heads at a time read the cache together. Scratch: K3_ATTEND_WORDS and as
 * many queries and contexts. Fault: RANGE, detail = token. */
#ifndef K3_OP_MLA_HEADS_H
#define K3_OP_MLA_HEADS_H

#include "mla_attend.h"
#include "mla_qlat.h"
#include "mla_uv_head.h"

typedef struct K3MlaHeads {
    const float *q, *gate; /* of token 0 */
    const uint16_t *kv_b;
    float *y, *ql, *ctx; /* ql [K3_ATTEND_HEADS][latent + rope], ctx [K3_ATTEND_HEADS][latent] */
    uint64_t q_width, width;
    uint32_t nope, v;
    int round;
} K3MlaHeads;

/* Heads [h0, h0 + n), n <= K3_ATTEND_HEADS, of one token. */
K3_FN void k3_mla_heads(K3Ctx *c, const K3MlaHeads *m, const K3Softmax *a, uint32_t t, uint32_t h0, uint32_t n) {
    const uint32_t latent = a->latent, rope = a->rope, nope = m->nope, v = m->v;
    const uint64_t of_head = (uint64_t)(nope + v) * latent;
    uint32_t h;
    for (h = 0; h < n; h++)
        k3_qlat_head(c, m->q + t * m->q_width + (uint64_t)(h0 + h) * (nope + rope), m->q_width, m->kv_b + (h0 + h) * of_head,
                     nope, rope, latent, 1u, m->ql + (uint64_t)h * (latent + rope), latent + rope, m->round);
    K3_SYNC(c);
    k3_attend_heads(c, a, t, n, m->ql, latent + rope, m->ctx);
    for (h = 0; h < n; h++) {
        const uint64_t at = t * m->width + (uint64_t)(h0 + h) * v;
        k3_uv_gate_head(c, m->kv_b + (h0 + h) * of_head + (uint64_t)nope * latent, latent, v, m->ctx + (uint64_t)h * latent,
                        m->gate + at, m->y + at, m->round);
    }
    K3_SYNC(c); /* the next heads overwrite work */
}

K3_FN void k3_op_mla_heads(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t rope = inst->param[K3_MLA_HEADS_ROPE], latent = inst->param[K3_MLA_HEADS_LATENT];
    float *work = k3_scratch(c, K3_ATTEND_WORDS(latent) + K3_ATTEND_HEADS * (2u * (uint64_t)latent + rope));
    K3MlaHeads m;
    K3Softmax a;
    uint32_t t, h;
    if (!work) return;
    m.q = k3_in(c, inst, K3_MLA_HEADS_Q);
    m.gate = k3_in(c, inst, K3_MLA_HEADS_GATE);
    m.kv_b = k3_bf16(c, inst, K3_MLA_HEADS_KV_B);
    m.y = k3_out(c, inst, K3_MLA_HEADS_Y);
    m.ctx = work + K3_ATTEND_WORDS(latent);
    m.ql = m.ctx + K3_ATTEND_HEADS * (uint64_t)latent;
    m.nope = inst->param[K3_MLA_HEADS_NOPE];
    m.v = inst->param[K3_MLA_HEADS_V];
    m.q_width = (uint64_t)inst->n_units * (m.nope + rope);
    m.width = inst->width;
    m.round = k3_flag(inst, K3_MLA_HEADS_ROUND);
    k3_attend_begin(&a, work, k3_in(c, inst, K3_MLA_HEADS_CACHE), latent, rope, k3_f32_param(inst, K3_MLA_HEADS_SCALE),
                    m.round);
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t, c->step->max_pages)) return;
        for (h = u0; h < u1; h += K3_ATTEND_HEADS) k3_mla_heads(c, &m, &a, t, h, k3_min(K3_ATTEND_HEADS, u1 - h));
    }
}

#endif

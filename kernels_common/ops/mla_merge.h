/* y[h] = mla_uv_gate of the pages of head h merged left to right (mla_page.h): mla_attend's end, and what follows it.
 *
 * Layout: parts f32 [T][pages][heads][latent + K3_PART_EXTRA], of which the pages up to the token's are read; gate, y
 * f32 [T][heads * v]; kv_b as in mla_uv.h. Unit: head. Reads parts, kv_b, gate; writes y. Scratch: latent. Fault:
 * RANGE, detail = token. */
#ifndef K3_OP_MLA_MERGE_H
#define K3_OP_MLA_MERGE_H

#include "mla_page.h"
#include "mla_uv_head.h"

/* o = context of a head: n pages, ld apart, the first at `page`. */
K3_FN void k3_merge_head(K3Ctx *c, const float *page, uint64_t ld, uint32_t n, uint32_t latent, float *o, int round) {
    K3Running r = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t p;
    for (p = 0; p < n; p++) {
        const float *K3_RESTRICT acc = page + p * ld;
        r = k3_merge_page(r, acc[latent], acc[latent + 1u], p == 0u);
        if (p == 0u) {
            K3_FOR(l, 0, latent) { o[l] = acc[l]; }
        } else {
            const float fa = r.fa, fb = r.fb;
            K3_FOR(l, 0, latent) { o[l] = k3_fma(fb, acc[l], fa * o[l]); } /* a lane's own elements: no barrier */
        }
    }
    K3_FOR(l, 0, latent) { o[l] = k3_rnd(o[l] / r.s, round); }
    K3_SYNC(c);
}

K3_FN void k3_op_mla_merge(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t nope = inst->param[K3_MLA_MERGE_NOPE], v = inst->param[K3_MLA_MERGE_V];
    const uint32_t latent = inst->param[K3_MLA_MERGE_LATENT], part = latent + K3_PART_EXTRA;
    const uint64_t ld = (uint64_t)inst->n_units * part, row = ld * inst->param[K3_MLA_MERGE_PAGES];
    const int round = k3_flag(inst, K3_MLA_MERGE_ROUND);
    float *o = k3_scratch(c, latent);
    uint32_t t, h;
    if (!o) return;
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t, inst->param[K3_MLA_MERGE_PAGES])) return;
        for (h = u0; h < u1; h++) {
            const float *page = k3_in(c, inst, K3_MLA_MERGE_PARTS) + t * row + (uint64_t)h * part;
            const uint64_t at = (uint64_t)t * inst->width + (uint64_t)h * v;
            const uint16_t *W_UV = k3_bf16(c, inst, K3_MLA_MERGE_KV_B) + ((uint64_t)h * (nope + v) + nope) * latent;
            k3_merge_head(c, page, ld, c->step->position[t] / K3_PAGE_TOKENS + 1u, latent, o, round);
            k3_uv_gate_head(c, W_UV, latent, v, o, k3_in(c, inst, K3_MLA_MERGE_GATE) + at,
                            k3_out(c, inst, K3_MLA_MERGE_Y) + at, round);
            K3_SYNC(c); /* the next head overwrites o */
        }
    }
}

#endif

/* cache[page of position][position mod 256] = [rmsnorm(latent; norm, eps) | shared key]; the key is not normed.
 *
 * Layout: x f32 [T][latent + rope], norm bf16 [latent], cache f32 [pages][256][latent + rope], the page by the
 * step's table. Unit: token. Reads x, norm, the page table; writes cache. Faults: RANGE (position past the
 * table), NONFINITE, detail = token. */
#ifndef K3_OP_MLA_CACHE_H
#define K3_OP_MLA_CACHE_H

#include "rmsnorm.h"

/* First row of the page that holds positions 256 * column .. of a token's sequence. */
K3_FN uint64_t k3_page_row(const K3Ctx *c, uint32_t token, uint32_t column) {
    const uint64_t entry = (uint64_t)c->step->slot[token] * c->step->max_pages + column;
    return (uint64_t)c->step->page_table[entry] * K3_PAGE_TOKENS;
}

K3_FN void k3_op_mla_cache(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t latent = inst->param[K3_MLA_CACHE_LATENT], rope = inst->param[K3_MLA_CACHE_ROPE];
    const uint32_t row = latent + rope;
    const float eps = k3_f32_param(inst, K3_MLA_CACHE_EPS);
    const int round = k3_flag(inst, K3_MLA_CACHE_ROUND);
    uint32_t t;
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++) {
        const uint32_t position = c->step->position[t];
        const float *x = k3_in(c, inst, K3_MLA_CACHE_X) + (uint64_t)t * row;
        float *out = k3_out(c, inst, K3_MLA_CACHE_CACHE);
        if (position / K3_PAGE_TOKENS >= c->step->max_pages) {
            k3_trap(c, K3_FAULT_RANGE, t);
            return;
        }
        out += (k3_page_row(c, t, position / K3_PAGE_TOKENS) + position % K3_PAGE_TOKENS) * row;
        k3_rmsnorm_row(c, x, k3_bf16(c, inst, K3_MLA_CACHE_NORM), latent, eps, out, t, round);
        K3_FOR(j, latent, row) { out[j] = k3_rnd(x[j], round); }
    }
}

#endif

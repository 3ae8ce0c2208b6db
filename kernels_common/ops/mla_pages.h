/* y[page][h] = [acc | m_p | s_p | 0 ...]: what a page of the cache gives to mla_attend by itself (mla_page.h).
 *
 * A page is read once, for all heads. Layout: q f32 [T][heads * (latent + rope)], cache as in mla_cache.h, y f32
 * [T][pages][heads][latent + K3_PART_EXTRA]. Unit: page of the token's sequence; one that no position of a token has
 * reached is left as it is, and mla_merge does not look at it. Reads q, cache, the page table; writes y. Scratch:
 * K3_PAGE_HEADS pages of scores. Fault: RANGE, detail = token. A flash build has the same bits from shared memory. */
#ifndef K3_OP_MLA_PAGES_H
#define K3_OP_MLA_PAGES_H

#include "mla_page.h"

#define K3_PAGE_HEADS 16u /* heads whose scores are in scratch together */

/* n positions, rows from `rows`, for n_heads <= K3_PAGE_HEADS whose queries and results lie side by side. */
K3_FN void k3_page_heads(K3Ctx *c, const K3Inst *inst, const float *rows, uint32_t n, uint32_t n_heads, const float *q, float *y,
                         float *e) {
    const uint32_t latent = inst->param[K3_MLA_PAGES_LATENT], width = latent + inst->param[K3_MLA_PAGES_ROPE];
    const uint32_t part = latent + K3_PART_EXTRA;
    uint32_t h;
    k3_rows_dot_f32(c, rows, width, 0u, n, width, 1u, q, width, n_heads, e, K3_PAGE_TOKENS);
    K3_SYNC(c);
    for (h = 0; h < n_heads; h++) {
        float *rest = y + (uint64_t)h * part + latent, s_p;
        const float m_p =
            k3_page_weights(c, e + h * K3_PAGE_TOKENS, n, k3_f32_param(inst, K3_MLA_PAGES_SCALE), &s_p);
        K3_FOR(j, 0, K3_PART_EXTRA) { rest[j] = j == 0u ? m_p : j == 1u ? s_p : 0.0f; }
    }
    k3_mix_rows_f32(c, rows, width, n, latent, e, K3_PAGE_TOKENS, n_heads, y, part);
    K3_SYNC(c); /* the next heads overwrite e */
}

#ifdef K3_FLASH
#include "simt_flash.h"
#endif

/* All heads of a token, over n positions of a page. */
K3_FN void k3_page(K3Ctx *c, const K3Inst *inst, const float *rows, uint32_t n, uint32_t heads, const float *q, float *y,
                   float *e) {
    const uint32_t latent = inst->param[K3_MLA_PAGES_LATENT], width = latent + inst->param[K3_MLA_PAGES_ROPE];
    const uint32_t part = latent + K3_PART_EXTRA;
    uint32_t h;
#ifdef K3_FLASH
    for (h = 0; h < heads && width <= K3_FLASH_WIDTH; h += K3_FLASH_HEADS)
        k3_flash_heads(c, &k3_flash_tile(), rows, n, k3_min(K3_FLASH_HEADS, heads - h), latent, width, k3_f32_param(inst, K3_MLA_PAGES_SCALE),
                       q + (uint64_t)h * width, y + (uint64_t)h * part);
    if (width <= K3_FLASH_WIDTH) return;
#endif
    for (h = 0; h < heads; h += K3_PAGE_HEADS)
        k3_page_heads(c, inst, rows, n, k3_min(K3_PAGE_HEADS, heads - h), q + (uint64_t)h * width, y + (uint64_t)h * part, e);
}

K3_FN void k3_op_mla_pages(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t latent = inst->param[K3_MLA_PAGES_LATENT], width = latent + inst->param[K3_MLA_PAGES_ROPE];
    const uint32_t part = latent + K3_PART_EXTRA, heads = inst->unit_cols / part;
    float *e = k3_scratch(c, K3_PAGE_HEADS * K3_PAGE_TOKENS);
    uint32_t t, p;
    if (!e) return;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t end = c->step->position[t] + 1u;
        if (k3_past_table(c, t, inst->n_units)) return;
        for (p = u0; p < u1 && p * K3_PAGE_TOKENS < end; p++) {
            const float *rows = k3_in(c, inst, K3_MLA_PAGES_CACHE) + k3_page_row(c, t, p) * width;
            const float *q = k3_in(c, inst, K3_MLA_PAGES_Q) + (uint64_t)t * heads * width;
            float *y = k3_out(c, inst, K3_MLA_PAGES_Y) + (uint64_t)t * inst->width + (uint64_t)p * inst->unit_cols;
            k3_page(c, inst, rows, k3_min(K3_PAGE_TOKENS, end - p * K3_PAGE_TOKENS), heads, q, y, e);
        }
    }
}

#endif

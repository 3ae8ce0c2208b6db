/* y[h] = softmax over positions <= own of (q . cache row) * scale, times the rows' latents: o / s of mla_page.h.
 *
 * Layout: q f32 [T][heads * (latent + rope)], cache f32 [pages][256][latent + rope], y f32 [T][heads * latent].
 * Unit: head. Reads q, cache, the page table; writes y. Scratch: K3_ATTEND_WORDS. Fault: RANGE, detail = token. */
#ifndef K3_OP_MLA_ATTEND_H
#define K3_OP_MLA_ATTEND_H

#include "mla_page.h"
#ifdef K3_FLASH
#include "simt_flash.h"
#endif

#define K3_ATTEND_HEADS 4u /* heads that share a reading of the cache */

typedef struct K3Softmax {
    float *e;    /* [heads][256]: scores, then exponentials */
    float *page; /* [heads][latent]: this page's latent sums */
    float *o;    /* [heads][latent]: running latent sums */
    float *stat; /* [heads][4]: running maximum, sum, and the factors of the merge, running sum's and page's */
    const float *cache;
    uint32_t latent, rope;
    float scale;
    int round; /* the result is behind a rounding point; scores, exponentials and sums never are */
} K3Softmax;

/* Words of work for k3_attend_begin. */
#define K3_ATTEND_WORDS(latent) (K3_ATTEND_HEADS * (K3_PAGE_TOKENS + 2u * (uint64_t)(latent) + 4u))

/* One head's dots of a page become exponentials; its running maximum and sum move on. */
K3_FN void k3_attend_weights(K3Ctx *c, const K3Softmax *a, uint32_t h, uint32_t n, int is_first) {
    float *stat = a->stat + 4u * h, s_p;
    const float m_p = k3_page_weights(c, a->e + h * K3_PAGE_TOKENS, n, a->scale, &s_p);
    K3Running r = {stat[0], stat[1], 0.0f, 0.0f};
    r = k3_merge_page(r, m_p, s_p, is_first);
    K3_SYNC(c); /* all lanes have read stat */
    if (K3_LANE0) {
        stat[0] = r.m;
        stat[1] = r.s;
        stat[2] = r.fa;
        stat[3] = r.fb;
    }
}

/* The next n positions, rows from `rows`, for heads whose queries lie ldq apart. */
K3_FN void k3_attend_page(K3Ctx *c, const K3Softmax *a, const float *rows, uint32_t n, uint32_t heads, const float *q,
                          uint64_t ldq, int is_first) {
    const uint32_t width = a->latent + a->rope, latent = a->latent;
    uint32_t h;
    k3_rows_dot_f32(c, rows, width, 0u, n, width, 1u, q, ldq, heads, a->e, K3_PAGE_TOKENS);
    K3_SYNC(c);
    for (h = 0; h < heads; h++) k3_attend_weights(c, a, h, n, is_first);
    K3_SYNC(c);
    k3_mix_rows_f32(c, rows, width, n, latent, a->e, K3_PAGE_TOKENS, heads, is_first ? a->o : a->page, latent);
    K3_SYNC(c);
    for (h = 0; h < heads && !is_first; h++) {
        const float fa = a->stat[4u * h + 2u], fb = a->stat[4u * h + 3u];
        const float *K3_RESTRICT page = a->page + (uint64_t)h * latent;
        float *K3_RESTRICT o = a->o + (uint64_t)h * latent;
        K3_FOR(l, 0, latent) { o[l] = k3_fma(fb, page[l], fa * o[l]); }
    }
    K3_SYNC(c); /* the next page overwrites e and page */
}

/* Up to K3_ATTEND_HEADS heads of one token, queries ldq and results latent apart. */
K3_FN void k3_attend_heads(K3Ctx *c, const K3Softmax *a, uint32_t t, uint32_t heads, const float *q, uint64_t ldq, float *y) {
    const uint32_t latent = a->latent, end = c->step->position[t] + 1u;
    uint32_t from, h;
    for (from = 0; from < end; from += K3_PAGE_TOKENS) {
        const float *rows = a->cache + k3_page_row(c, t, from / K3_PAGE_TOKENS) * (latent + a->rope);
        k3_attend_page(c, a, rows, k3_min(K3_PAGE_TOKENS, end - from), heads, q, ldq, from == 0u);
    }
    for (h = 0; h < heads; h++) {
        const float *K3_RESTRICT o = a->o + (uint64_t)h * latent;
        const float s = a->stat[4u * h + 1u];
        float *K3_RESTRICT out = y + (uint64_t)h * latent;
        K3_FOR(l, 0, latent) { out[l] = k3_rnd(o[l] / s, a->round); }
    }
    K3_SYNC(c); /* the next heads overwrite o and stat */
}

/* Lay out K3_ATTEND_WORDS of work. */
K3_FN void k3_attend_begin(K3Softmax *a, float *work, const float *cache, uint32_t latent, uint32_t rope, float scale,
                           int round) {
    a->round = round;
    a->e = work;
    a->page = a->e + K3_ATTEND_HEADS * K3_PAGE_TOKENS;
    a->o = a->page + (uint64_t)K3_ATTEND_HEADS * latent;
    a->stat = a->o + (uint64_t)K3_ATTEND_HEADS * latent;
    a->cache = cache;
    a->latent = latent;
    a->rope = rope;
    a->scale = scale;
}

K3_FN void k3_op_mla_attend(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t latent = inst->param[K3_MLA_ATTEND_LATENT], rope = inst->param[K3_MLA_ATTEND_ROPE];
    const uint64_t q_width = (uint64_t)inst->n_units * (latent + rope);
    float *work = k3_scratch(c, K3_ATTEND_WORDS(latent));
    K3Softmax a;
    uint32_t t, h;
    if (!work) return;
#ifdef K3_FLASH
    if (latent + rope <= K3_FLASH_WIDTH) {
        uint32_t n;
        for (t = 0; t < c->step->n_tokens; t++)
            if (k3_past_table(c, t, inst->param[K3_MLA_ATTEND_PAGES])) return;
        for (t = 0; t < c->step->n_tokens; t += n) {
            n = k3_flash_run(c->step, t);
            for (h = u0; h < u1; h++)
                k3_flash_tokens(c, &k3_flash_tile(), k3_in(c, inst, K3_MLA_ATTEND_CACHE), t, n, latent, latent + rope,
                                k3_f32_param(inst, K3_MLA_ATTEND_SCALE),
                                k3_in(c, inst, K3_MLA_ATTEND_Q) + t * q_width + (uint64_t)h * (latent + rope), q_width,
                                k3_out(c, inst, K3_MLA_ATTEND_Y) + (uint64_t)t * inst->width + (uint64_t)h * latent, inst->width,
                                k3_flag(inst, K3_MLA_ATTEND_ROUND));
        }
        return;
    }
#endif
    k3_attend_begin(&a, work, k3_in(c, inst, K3_MLA_ATTEND_CACHE), latent, rope, k3_f32_param(inst, K3_MLA_ATTEND_SCALE),
                    k3_flag(inst, K3_MLA_ATTEND_ROUND));
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t, inst->param[K3_MLA_ATTEND_PAGES])) return;
        for (h = u0; h < u1; h += K3_ATTEND_HEADS)
            k3_attend_heads(c, &a, t, k3_min(K3_ATTEND_HEADS, u1 - h),
                            k3_in(c, inst, K3_MLA_ATTEND_Q) + t * q_width + (uint64_t)h * (latent + rope), latent + rope,
                            k3_out(c, inst, K3_MLA_ATTEND_Y) + (uint64_t)t * inst->width + (uint64_t)h * latent);
    }
}

#endif

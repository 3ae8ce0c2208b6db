/* y[h] = softmax over positions <= own of (q . cache row) * scale, times the rows' latents; by pages of 256.
 *
 *   score = one rule-3 dot over latent then shared part, at any length; positions after the query are absent
 *   page: m_p = max, e_j = exp(s_j - m_p), s_p a rule-3 plain sum over j, acc = fma(e_j, l_j, acc) in order
 *   pages merge left to right, the first copies: M = max(m, m_p), a = exp(m - M), b = exp(m_p - M),
 *   s = fma(b, s_p, a s), o likewise; end y = o / s
 *
 * Layout: q f32 [T][heads * (latent + rope)], cache f32 [pages][256][latent + rope], y f32 [T][heads * latent].
 * Unit: head. Reads q, cache, the page table; writes y. Scratch: K3_ATTEND_WORDS. Fault: RANGE, detail = token. */
#ifndef K3_OP_MLA_ATTEND_H
#define K3_OP_MLA_ATTEND_H

#include "mla_cache.h"

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

/* One head's scores of a page become exponentials; its running maximum and sum move on. */
K3_FN void k3_attend_weights(K3Ctx *c, const K3Softmax *a, uint32_t h, uint32_t n, int is_first) {
    float *e = a->e + h * K3_PAGE_TOKENS, *stat = a->stat + 4u * h;
    float m_p, s_p, M, fa, fb;
    uint32_t i;
    K3_FOR(j, 0, n) { e[j] = e[j] * a->scale; }
    K3_SYNC(c);
    m_p = e[0];
    for (i = 1; i < n; i++) m_p = e[i] > m_p ? e[i] : m_p;
    K3_SYNC(c); /* all lanes have read the scores */
    K3_FOR(j, 0, n) { e[j] = k3_exp(e[j] - m_p); }
    K3_SYNC(c);
    s_p = k3_sum_f32(c, e, n);
    M = is_first || m_p > stat[0] ? m_p : stat[0];
    fa = is_first ? 0.0f : k3_exp(stat[0] - M);
    fb = k3_exp(m_p - M);
    s_p = is_first ? s_p : k3_fma(fb, s_p, fa * stat[1]);
    K3_SYNC(c); /* all lanes have read stat */
    if (K3_LANE0) {
        stat[0] = M;
        stat[1] = s_p;
        stat[2] = fa;
        stat[3] = fb;
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

/* Whether a token's position is past the page table; leaves a fault. */
K3_FN int k3_past_table(K3Ctx *c, uint32_t t) {
    if (c->step->position[t] / K3_PAGE_TOKENS < c->step->max_pages) return 0;
    k3_trap(c, K3_FAULT_RANGE, t);
    return 1;
}

K3_FN void k3_op_mla_attend(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t latent = inst->param[K3_MLA_ATTEND_LATENT], rope = inst->param[K3_MLA_ATTEND_ROPE];
    const uint64_t q_width = (uint64_t)inst->n_units * (latent + rope);
    float *work = k3_scratch(c, K3_ATTEND_WORDS(latent));
    K3Softmax a;
    uint32_t t, h;
    if (!work) return;
    k3_attend_begin(&a, work, k3_in(c, inst, K3_MLA_ATTEND_CACHE), latent, rope, k3_f32_param(inst, K3_MLA_ATTEND_SCALE),
                    k3_flag(inst, K3_MLA_ATTEND_ROUND));
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t)) return;
        for (h = u0; h < u1; h += K3_ATTEND_HEADS)
            k3_attend_heads(c, &a, t, k3_min(K3_ATTEND_HEADS, u1 - h),
                            k3_in(c, inst, K3_MLA_ATTEND_Q) + t * q_width + (uint64_t)h * (latent + rope), latent + rope,
                            k3_out(c, inst, K3_MLA_ATTEND_Y) + (uint64_t)t * inst->width + (uint64_t)h * latent);
    }
}

#endif

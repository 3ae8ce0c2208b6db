/* y[h] = softmax over positions <= own of (q . cache row) * scale, times the rows' latents; by pages of 256.
 *
 *   score = one rule-3 dot over latent then shared part, at any length; positions after the query are absent
 *   page: m_p = max, e_j = exp(s_j - m_p), s_p a rule-3 plain sum over j, acc = fma(e_j, l_j, acc) in order
 *   pages merge left to right, the first copies: M = max(m, m_p), a = exp(m - M), b = exp(m_p - M),
 *   s = fma(b, s_p, a s), o likewise; end y = o / s
 *
 * Layout: q f32 [T][heads * (latent + rope)], cache f32 [pages][256][latent + rope], y f32 [T][heads * latent].
 * Unit: head. Reads q, cache, the page table; writes y. Scratch: 256 + 2 latent. Fault: RANGE, detail = token. */
#ifndef K3_OP_MLA_ATTEND_H
#define K3_OP_MLA_ATTEND_H

#include "mla_cache.h"

typedef struct K3Softmax {
    float m, s; /* running maximum and sum */
    float *o;   /* running latent sum */
    float *page; /* this page's latent sum */
    float *e;    /* [256]: scores, then exponentials */
    const float *cache;
    uint32_t latent, rope;
    float scale;
    int round; /* the result is behind a rounding point; scores, exponentials and sums never are */
} K3Softmax;

/* n positions of one page (rows from `rows`); leaves e and page filled, returns m_p, *s_p. */
K3_FN float k3_attend_page(K3Ctx *c, const K3Softmax *a, const float *rows, uint32_t n, uint32_t latent,
                           uint32_t rope, const float *q, float scale, float *s_p) {
    const uint32_t width = latent + rope;
    float m_p;
    uint32_t i;
    k3_rows_dot_f32(c, rows, width, 0u, n, width, 1u, q, width, 1u, a->e, K3_PAGE_TOKENS);
    K3_SYNC(c);
    K3_FOR(j, 0, n) { a->e[j] = a->e[j] * scale; }
    K3_SYNC(c);
    m_p = a->e[0];
    for (i = 1; i < n; i++) m_p = a->e[i] > m_p ? a->e[i] : m_p;
    K3_SYNC(c); /* all lanes have read the scores */
    K3_FOR(j, 0, n) { a->e[j] = k3_exp(a->e[j] - m_p); }
    K3_FOR(l, 0, latent) { a->page[l] = 0.0f; }
    K3_SYNC(c);
    *s_p = k3_sum_f32(c, a->e, n);
    for (i = 0; i < n; i++) {
        const float *K3_RESTRICT row = rows + (uint64_t)i * width;
        float *K3_RESTRICT acc = a->page;
        const float e = a->e[i];
        K3_FOR(l, 0, latent) { acc[l] = k3_fma(e, row[l], acc[l]); }
    }
    return m_p;
}

/* Merge a page into the running softmax. A lane owns its latents, so no barrier is needed. */
K3_FN void k3_attend_merge(K3Softmax *a, float m_p, float s_p, uint32_t latent, int is_first) {
    const float M = is_first || m_p > a->m ? m_p : a->m;
    const float fa = k3_exp(a->m - M), fb = k3_exp(m_p - M);
    if (is_first) {
        K3_FOR(l, 0, latent) { a->o[l] = a->page[l]; }
        a->s = s_p;
    } else {
        K3_FOR(l, 0, latent) { a->o[l] = k3_fma(fb, a->page[l], fa * a->o[l]); }
        a->s = k3_fma(fb, s_p, fa * a->s);
    }
    a->m = M;
}

/* One head of one token. */
K3_FN void k3_attend_head(K3Ctx *c, K3Softmax *a, uint32_t t, const float *q, float *y) {
    const uint32_t latent = a->latent, rope = a->rope;
    const uint32_t end = c->step->position[t] + 1u;
    uint32_t from;
    a->m = a->s = 0.0f;
    for (from = 0; from < end; from += K3_PAGE_TOKENS) {
        const float *rows = a->cache + k3_page_row(c, t, from / K3_PAGE_TOKENS) * (latent + rope);
        float s_p;
        const float m_p = k3_attend_page(c, a, rows, k3_min(K3_PAGE_TOKENS, end - from), latent, rope, q,
                                         a->scale, &s_p);
        k3_attend_merge(a, m_p, s_p, latent, from == 0u);
        K3_SYNC(c); /* the next page overwrites e */
    }
    K3_FOR(l, 0, latent) { y[l] = k3_rnd(a->o[l] / a->s, a->round); }
}

/* Lay out 256 + 2 latent floats of work. */
K3_FN void k3_attend_begin(K3Softmax *a, float *work, const float *cache, uint32_t latent, uint32_t rope, float scale,
                           int round) {
    a->round = round;
    a->e = work;
    a->page = work + K3_PAGE_TOKENS;
    a->o = a->page + latent;
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
    float *work = k3_scratch(c, K3_PAGE_TOKENS + 2u * (uint64_t)latent);
    K3Softmax a;
    uint32_t t, h;
    if (!work) return;
    k3_attend_begin(&a, work, k3_in(c, inst, K3_MLA_ATTEND_CACHE), latent, rope, k3_f32_param(inst, K3_MLA_ATTEND_SCALE),
                    k3_flag(inst, K3_MLA_ATTEND_ROUND));
    for (t = 0; t < c->step->n_tokens; t++) {
        if (k3_past_table(c, t)) return;
        for (h = u0; h < u1; h++)
            k3_attend_head(c, &a, t,
                           k3_in(c, inst, K3_MLA_ATTEND_Q) + t * q_width + (uint64_t)h * (latent + rope),
                           k3_out(c, inst, K3_MLA_ATTEND_Y) + (uint64_t)t * inst->width + (uint64_t)h * latent);
    }
}

#endif

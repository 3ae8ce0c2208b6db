/* The softmax of latent attention over one page of the cache, and how pages merge: for the ops that attend.
 *
 *   score = one rule-3 dot over latent then shared part, at any length; positions after the query are absent
 *   page: m_p = max, e_j = exp(s_j - m_p), s_p a rule-3 plain sum over j, acc = fma(e_j, l_j, acc) in order
 *   pages merge left to right, the first copies: M = max(m, m_p), a = exp(m - M), b = exp(m_p - M),
 *   s = fma(b, s_p, a s), o likewise
 *
 * Wrong: any other order of merging, though it is the same softmax. */
#ifndef K3_MLA_PAGE_H
#define K3_MLA_PAGE_H

#include "mla_cache.h"

typedef struct K3Running { /* of one head: the pages so far */
    float m, s;
    float fa, fb; /* factors of the last merge, of what was there and of the page */
} K3Running;

/* One head's n dots become exponentials e; gives their maximum as scores and their sum. */
K3_FN float k3_page_weights(K3Ctx *c, float *e, uint32_t n, float scale, float *s_p) {
    float m_p;
    uint32_t i;
    K3_FOR(j, 0, n) { e[j] = e[j] * scale; }
    K3_SYNC(c);
    m_p = e[0];
    for (i = 1; i < n; i++) m_p = e[i] > m_p ? e[i] : m_p;
    K3_SYNC(c); /* all lanes have read the scores */
    K3_FOR(j, 0, n) { e[j] = k3_exp(e[j] - m_p); }
    K3_SYNC(c);
    *s_p = k3_sum_f32(c, e, n);
    return m_p;
}

/* What is left of the pages so far when one more is merged in. */
K3_FN K3Running k3_merge_page(K3Running r, float m_p, float s_p, int is_first) {
    const float M = is_first || m_p > r.m ? m_p : r.m;
    r.fa = is_first ? 0.0f : k3_exp(r.m - M);
    r.fb = k3_exp(m_p - M);
    r.s = is_first ? s_p : k3_fma(r.fb, s_p, r.fa * r.s);
    r.m = M;
    return r;
}

/* Whether a token's position is past the page table, or past `pages` of it; leaves a fault. */
K3_FN int k3_past_table(K3Ctx *c, uint32_t t, uint32_t pages) {
    if (c->step->position[t] / K3_PAGE_TOKENS < k3_min(pages, c->step->max_pages)) return 0;
    k3_trap(c, K3_FAULT_RANGE, t);
    return 1;
}

#endif

/* y[t][s][r] = situ(rule 3 over w1[expert s][r] with z[t], rule 3 over w3[expert s][r] with z[t]).
 *
 * Layout: moe_up_mxfp4.h. Unit: row of an expert. Expert by expert, as moe_union.h has it. Reads z, route, w1, w3;
 * writes y. Scratch: K3_GLU_WORDS. */
#ifndef K3_OP_MOE_GLU_MXFP4_H
#define K3_OP_MOE_GLU_MXFP4_H

#include "moe_union.h"

typedef struct K3Glu {
    const K3Expert *w1, *w3; /* by expert */
    const float *z;          /* [T][K] */
    float *y;                /* [T][top_k][rows] */
    uint32_t K, rows;
    float beta, linear;
    int round;
} K3Glu;

#define K3_GLU_WORDS(n_tok) \
    (2u * (uint64_t)K3_GLU_ROWS(n_tok) * k3_min(n_tok, K3_EXPERT_TOKENS) + K3_UNION_WORDS(n_tok))

/* Behind w3's rows up to r of expert e come w1's next ones, or the next expert's. */
K3_FN void k3_glu_soon(K3Ctx *c, const K3Glu *m, const K3Union *u, uint32_t e, uint32_t r, uint32_t u0, uint32_t u1) {
    const uint32_t next = r < u1 ? e : k3_union_peek(u), row = r < u1 ? r : u0;
    if (next == K3_UNION_NONE || !k3_may_touch(&m->w1[next])) return;
    k3_soon(c, m->w1[next].packed + (uint64_t)row * (m->K / 2u), m->w1[next].scale + (uint64_t)row * (m->K / K3_MX_GROUP));
}

/* Rows [u0, u1) of expert e for the n tokens that it serves. work: 2 n K3_GLU_ROWS. */
K3_FN void k3_expert_glu(K3Ctx *c, const K3Glu *m, const K3Union *served, uint32_t e, uint32_t n, uint32_t u0, uint32_t u1,
                         float *work) {
    const uint32_t tile = K3_GLU_ROWS(c->step->n_tokens);
    float *g = work, *u = work + n * tile;
    uint32_t r, i;
    for (r = u0; r < u1; r += tile) {
        const uint32_t rows = k3_min(tile, u1 - r);
        const uint64_t packed = (uint64_t)r * (m->K / 2u), scale = (uint64_t)r * (m->K / K3_MX_GROUP);
        k3_soon(c, m->w3[e].packed + packed, m->w3[e].scale + scale);
        k3_linear_mxfp4_at(c, m->w1[e].packed + packed, m->w1[e].scale + scale, 0u, rows, m->K, m->z, served->tokens, n, g,
                           tile, m->round);
        k3_glu_soon(c, m, served, e, r + rows, u0, u1);
        k3_linear_mxfp4_at(c, m->w3[e].packed + packed, m->w3[e].scale + scale, 0u, rows, m->K, m->z, served->tokens, n, u,
                           tile, m->round);
        K3_SYNC(c);
        for (i = 0; i < n; i++) {
            float *out = m->y + (uint64_t)served->at[i] * m->rows + r;
            const float *gi = g + i * tile, *ui = u + i * tile;
            K3_FOR(j, 0, rows) {
                out[j] = k3_rnd(k3_situ(k3_rnd(gi[j], m->round), k3_rnd(ui[j], m->round), m->beta, m->linear), m->round);
            }
        }
        K3_SYNC(c); /* the next tile overwrites g and u */
    }
}

/* Every expert of a step's routes, each as soon as it is there: its results are its own. work: K3_GLU_WORDS. */
K3_FN void k3_experts_glu(K3Ctx *c, const K3Glu *m, const uint32_t *ids, uint32_t top_k, uint32_t u0, uint32_t u1,
                          float *work) {
    K3Union u;
    uint32_t e, n, i;
    k3_union_begin(c, &u, ids, top_k, work);
    k3_union_rewind(c, &u);
    for (i = 0; (n = k3_union_next(c, &u, &e)) != 0u; i++) {
        if (k3_was_done(c, i)) continue;
        if (!k3_is_here(c, m->w1, e) || !k3_is_here(c, m->w3, e)) return;
        k3_expert_glu(c, m, &u, e, n, u0, u1, work + K3_UNION_WORDS(u.n_tok));
        k3_note_done(c, i);
    }
}

K3_FN void k3_op_moe_glu_mxfp4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    float *work = k3_scratch(c, K3_GLU_WORDS(c->step->n_tokens));
    K3Glu m;
    if (!work) return;
    m.w1 = k3_experts(c, inst, K3_MOE_GLU_MXFP4_W1);
    m.w3 = k3_experts(c, inst, K3_MOE_GLU_MXFP4_W3);
    m.z = k3_in(c, inst, K3_MOE_GLU_MXFP4_Z);
    m.y = k3_out(c, inst, K3_MOE_GLU_MXFP4_Y);
    m.K = inst->param[K3_MOE_GLU_MXFP4_K];
    m.rows = inst->n_units;
    m.beta = k3_f32_param(inst, K3_MOE_GLU_MXFP4_BETA);
    m.linear = k3_f32_param(inst, K3_MOE_GLU_MXFP4_LINEAR_BETA);
    m.round = k3_flag(inst, K3_MOE_GLU_MXFP4_ROUND);
    k3_experts_glu(c, &m, k3_words(c, inst, K3_MOE_GLU_MXFP4_ROUTE), inst->param[K3_MOE_GLU_MXFP4_TOP_K], u0, u1, work);
}

#endif

/* y[t][r] = tree over this rank's blocks of the experts' sum inside a block (rule 5).
 *
 *   d = rule 3 over block b of row r of w2[expert s] with x[t][s]; the experts ascend by id (as the route has
 *   them): acc_b = w d for the first, then acc_b = fma(w, d, acc_b); y = tree(acc)
 *
 * An expert's own output is never formed: adding whole experts would put the block tree inside. Layout: x f32
 * [T][top_k][K], route [T][2 top_k] words, w2 one K3Expert per expert, y f32 [T][width]; K and n_blocks are this
 * rank's. Unit: row. Expert by expert, as moe_union.h has it. Reads x, route, w2; writes y. Scratch: K3_COMBINE_WORDS. */
#ifndef K3_OP_MOE_DOWN_MXFP4_H
#define K3_OP_MOE_DOWN_MXFP4_H

#include "moe_union.h"

typedef struct K3Combine {
    const K3Expert *w2;    /* by expert */
    const uint32_t *route; /* of token 0: top_k ids, then as many weights */
    const float *x;        /* [T][top_k][K] */
    float *y;              /* [T][width] */
    uint32_t K, top_k, n_blocks, width;
    int x_bf16; /* x holds bf16 values */
} K3Combine;

/* Rows at a time. Block sums of all tokens are kept until the last expert; but with fewer rows an expert's tokens would be
 * read, and packed by the leaf, more often than its weights. */
#define K3_COMBINE_WORDS(n_tok, n_blocks) \
    ((uint64_t)(n_blocks) * K3_TILE_ROWS * ((n_tok) + k3_min(n_tok, K3_EXPERT_TOKENS)) + K3_UNION_WORDS(n_tok))

/* acc of the tokens an expert serves: its block sums d, weighed by each token's route. size: sums of a token. */
K3_FN void k3_combine_add(const K3Combine *m, const K3Union *u, uint32_t n, uint32_t size,
                          const float *K3_RESTRICT d, float *K3_RESTRICT sums) {
    uint32_t i;
    for (i = 0; i < n; i++) {
        const uint32_t t = u->tokens[i], slot = u->at[i] - t * m->top_k;
        const float w = k3_bits_to_f32(m->route[(2u * (uint64_t)t + 1u) * m->top_k + slot]);
        const float *K3_RESTRICT di = d + (uint64_t)i * size;
        float *K3_RESTRICT acc = sums + (uint64_t)t * size;
        if (slot == 0u) {
            K3_FOR(j, 0, size) { acc[j] = w * di[j]; }
        } else {
            K3_FOR(j, 0, size) { acc[j] = k3_fma(w, di[j], acc[j]); }
        }
    }
}

/* Behind rows r of one expert come the next expert's, or the first one's from `row` on. */
K3_FN void k3_combine_soon(K3Ctx *c, const K3Combine *m, const K3Union *u, uint32_t r, uint32_t row, uint32_t u1) {
    uint32_t e = k3_union_peek(u);
    if (e == K3_UNION_NONE && row < u1) {
        e = k3_union_first(u);
        r = row;
    }
    if (e == K3_UNION_NONE) return;
    k3_soon(c, m->w2[e].packed + (uint64_t)r * (m->K / 2u), m->w2[e].scale + (uint64_t)r * (m->K / K3_MX_GROUP));
}

/* Rows [u0, u1) of every token. work: K3_COMBINE_WORDS. */
K3_FN void k3_combine(K3Ctx *c, const K3Combine *m, uint32_t u0, uint32_t u1, float *work) {
    const uint32_t n_tok = c->step->n_tokens, rows = K3_TILE_ROWS, nb = m->n_blocks;
    float *sums = work + K3_UNION_WORDS(n_tok);
    float *d = sums + (uint64_t)nb * rows * n_tok;
    uint32_t r, t, e, n;
    K3Union u;
    k3_union_begin(c, &u, m->route, m->top_k, work);
    for (r = u0; r < u1; r += rows) {
        const uint32_t n_rows = k3_min(rows, u1 - r), size = n_rows * nb;
        k3_union_rewind(c, &u);
        while ((n = k3_union_next(c, &u, &e)) != 0u) {
            if (!k3_is_here(c, m->w2, e)) return;
            k3_combine_soon(c, m, &u, r, r + n_rows, u1);
            k3_blocks_mxfp4_at(c, m->w2[e].packed, m->w2[e].scale, r, r + n_rows, m->K, nb, m->x, u.at, n, d, size,
                               m->x_bf16);
            K3_SYNC(c);
            k3_combine_add(m, &u, n, size, d, sums); /* the walk's next step waits before d is written again */
        }
        for (t = 0; t < n_tok; t++) {
            float *y = m->y + (uint64_t)t * m->width + r;
            const float *acc = sums + (uint64_t)t * size;
            K3_FOR(i, 0, n_rows) { y[i] = k3_tree(acc + i * nb, nb); }
        }
    }
}

K3_FN void k3_op_moe_down_mxfp4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t n_blocks = inst->param[K3_MOE_DOWN_MXFP4_N_BLOCKS];
    float *work = k3_scratch(c, K3_COMBINE_WORDS(c->step->n_tokens, n_blocks));
    K3Combine m;
    if (!work) return;
    m.w2 = k3_experts(c, inst, K3_MOE_DOWN_MXFP4_W2);
    m.route = k3_words(c, inst, K3_MOE_DOWN_MXFP4_ROUTE);
    m.x = k3_in(c, inst, K3_MOE_DOWN_MXFP4_X);
    m.y = k3_out(c, inst, K3_MOE_DOWN_MXFP4_Y);
    m.K = inst->param[K3_MOE_DOWN_MXFP4_K];
    m.top_k = inst->param[K3_MOE_DOWN_MXFP4_TOP_K];
    m.n_blocks = n_blocks;
    m.width = inst->width;
    m.x_bf16 = k3_flag(inst, K3_MOE_DOWN_MXFP4_X_BF16);
    k3_combine(c, &m, u0, u1, work);
}

#endif

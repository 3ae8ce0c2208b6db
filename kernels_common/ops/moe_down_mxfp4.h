/* y[t][r] = tree over this rank's blocks of the experts' sum inside a block (rule 5).
 *
 *   d = rule 3 over block b of row r of w2[expert s] with x[t][s]; the experts ascend by id (as the route has
 *   them): acc_b = w d for the first, then acc_b = fma(w, d, acc_b); y = tree(acc)
 *
 * An expert's own output is never formed: adding whole experts would put the block tree inside. Layout: x f32
 * [T][top_k][K], route [T][2 top_k] words, w2 one K3Expert per expert, y f32 [T][width]; K and n_blocks are this
 * rank's. Unit: row. Reads x, route, w2; writes y. Scratch: 16 K3_TILE_ROWS. */
#ifndef K3_OP_MOE_DOWN_MXFP4_H
#define K3_OP_MOE_DOWN_MXFP4_H

#include "body.h"

typedef struct K3Combine {
    const K3Expert *w2;
    const uint32_t *ids;
    const float *weight, *x;
    uint32_t K, top_k, n_blocks;
    int x_bf16; /* x holds bf16 values */
} K3Combine;

/* Rows [r, r + n), n <= K3_TILE_ROWS, of one token. work: 16 K3_TILE_ROWS. */
K3_FN void k3_combine_rows(K3Ctx *c, const K3Combine *m, uint32_t r, uint32_t n, float *work, float *y) {
    float *K3_RESTRICT d = work;
    float *K3_RESTRICT acc = work + 8u * K3_TILE_ROWS;
    const uint32_t nb = m->n_blocks;
    uint32_t s;
    for (s = 0; s < m->top_k; s++) {
        const K3Expert *e = m->w2 + m->ids[s];
        const float w = m->weight[s];
        k3_blocks_mxfp4(c, e->packed, e->scale, r, r + n, m->K, nb, m->x + (uint64_t)s * m->K, d, m->x_bf16);
        K3_SYNC(c);
        if (s == 0u) {
            K3_FOR(j, 0, n * nb) { acc[j] = w * d[j]; }
        } else {
            K3_FOR(j, 0, n * nb) { acc[j] = k3_fma(w, d[j], acc[j]); }
        }
        K3_SYNC(c); /* the next expert overwrites d */
    }
    K3_FOR(i, 0, n) { y[r + i] = k3_tree(acc + i * nb, nb); }
    K3_SYNC(c);
}

K3_FN void k3_op_moe_down_mxfp4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_MOE_DOWN_MXFP4_K], top_k = inst->param[K3_MOE_DOWN_MXFP4_TOP_K];
    float *work = k3_scratch(c, 16u * K3_TILE_ROWS);
    K3Combine m;
    uint32_t t, r;
    if (!work) return;
    m.w2 = k3_experts(c, inst, K3_MOE_DOWN_MXFP4_W2);
    m.K = K;
    m.x_bf16 = k3_flag(inst, K3_MOE_DOWN_MXFP4_X_BF16);
    m.top_k = top_k;
    m.n_blocks = inst->param[K3_MOE_DOWN_MXFP4_N_BLOCKS];
    for (t = 0; t < c->step->n_tokens; t++) {
        m.ids = k3_words(c, inst, K3_MOE_DOWN_MXFP4_ROUTE) + 2u * (uint64_t)top_k * t;
        m.weight = (const float *)(m.ids + top_k);
        m.x = k3_in(c, inst, K3_MOE_DOWN_MXFP4_X) + (uint64_t)t * top_k * K;
        for (r = u0; r < u1; r += K3_TILE_ROWS)
            k3_combine_rows(c, &m, r, k3_min(K3_TILE_ROWS, u1 - r), work,
                            k3_out(c, inst, K3_MOE_DOWN_MXFP4_Y) + (uint64_t)t * inst->width);
    }
}

#endif

/* y[t][r] = situ(rule 3 over gate[r] with x[t], rule 3 over up[r] with x[t]).
 *
 * Layout: gate, up bf16 [rows][K], x f32 [T][K], y f32 [T][width]. Unit: row. Reads x, gate, up; writes y.
 * Scratch: 2 x T x K3_GLU_ROWS. */
#ifndef K3_OP_GLU_BF16_H
#define K3_OP_GLU_BF16_H

#include "body.h"

K3_FN void k3_op_glu_bf16(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_GLU_BF16_K], n_tok = c->step->n_tokens;
    const uint16_t *gate = k3_bf16(c, inst, K3_GLU_BF16_GATE), *up = k3_bf16(c, inst, K3_GLU_BF16_UP);
    const float *x = k3_in(c, inst, K3_GLU_BF16_X);
    const float beta = k3_f32_param(inst, K3_GLU_BF16_BETA), linear = k3_f32_param(inst, K3_GLU_BF16_LINEAR_BETA);
    const int round = k3_flag(inst, K3_GLU_BF16_ROUND);
    float *y = k3_out(c, inst, K3_GLU_BF16_Y);
    const uint32_t tile = K3_GLU_ROWS(n_tok);
    float *g = k3_scratch(c, 2u * (uint64_t)n_tok * tile);
    float *u = g + (uint64_t)n_tok * tile;
    uint32_t r, t;
    if (!g) return;
    k3_same_x(c, x);
    for (r = u0; r < u1; r += tile) {
        const uint32_t n = k3_min(tile, u1 - r);
        k3_linear_bf16(c, gate + (uint64_t)r * K, K, 0u, n, K, 1u, x, K, n_tok, g, tile, round);
        k3_linear_bf16(c, up + (uint64_t)r * K, K, 0u, n, K, 1u, x, K, n_tok, u, tile, round);
        K3_SYNC(c);
        for (t = 0; t < n_tok; t++) {
            float *out = y + (uint64_t)t * inst->width + r;
            const float *gt = g + (uint64_t)t * tile, *ut = u + (uint64_t)t * tile;
            K3_FOR(j, 0, n) { out[j] = k3_rnd(k3_situ(k3_rnd(gt[j], round), k3_rnd(ut[j], round), beta, linear), round); }
        }
        K3_SYNC(c); /* the next tile overwrites g and u */
    }
}

#endif

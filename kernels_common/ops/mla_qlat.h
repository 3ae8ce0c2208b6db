/* y[h] = [q_lat | q_rope], q_lat_l = rule 3 over d < nope of W_UK[h][d][l] q_d: the query carried to the latent.
 *
 * Layout: q f32 [T][heads * (nope + rope)]; kv_b bf16 [heads * (nope + v)][latent], the key rows of a head first;
 * y f32 [T][heads * (latent + rope)]. Unit: head. Never fold kv_b into q_b: other bits. Reads q, kv_b; writes y. */
#ifndef K3_OP_MLA_QLAT_H
#define K3_OP_MLA_QLAT_H

#include "body.h"

/* One head of n_tok tokens: q [nope + rope] ldq apart, W_UK the head's key rows, y [latent + rope] ldy apart. */
K3_FN void k3_qlat_head(K3Ctx *c, const float *q, uint64_t ldq, const uint16_t *W_UK, uint32_t nope, uint32_t rope,
                        uint32_t latent, uint32_t n_tok, float *y, uint64_t ldy, int round) {
    uint32_t t;
    if (round)
        k3_cols_tokens_bf16_x16(c, W_UK, latent, nope, latent, q, ldq, n_tok, y, ldy);
    else
        k3_cols_tokens_bf16(c, W_UK, latent, nope, latent, q, ldq, n_tok, y, ldy);
    for (t = 0; t < n_tok; t++) {
        K3_FOR(j, 0, rope) { y[t * ldy + latent + j] = q[t * ldq + nope + j]; }
    }
    k3_round_columns(c, y, ldy, 0u, latent, n_tok, round);
}

K3_FN void k3_op_mla_qlat(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t nope = inst->param[K3_MLA_QLAT_NOPE], rope = inst->param[K3_MLA_QLAT_ROPE];
    const uint32_t latent = inst->param[K3_MLA_QLAT_LATENT], v = inst->param[K3_MLA_QLAT_V];
    uint32_t h;
    for (h = u0; h < u1; h++)
        k3_qlat_head(c, k3_in(c, inst, K3_MLA_QLAT_Q) + (uint64_t)h * (nope + rope), (uint64_t)inst->n_units * (nope + rope),
                     k3_bf16(c, inst, K3_MLA_QLAT_KV_B) + (uint64_t)h * (nope + v) * latent, nope, rope, latent,
                     c->step->n_tokens, k3_out(c, inst, K3_MLA_QLAT_Y) + (uint64_t)h * (latent + rope), inst->width,
                     k3_flag(inst, K3_MLA_QLAT_ROUND));
}

#endif

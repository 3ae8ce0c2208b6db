/* y[h] = [q_lat | q_rope], q_lat_l = rule 3 over d < nope of W_UK[h][d][l] q_d: the query carried to the latent.
 *
 * Layout: q f32 [T][heads * (nope + rope)]; kv_b bf16 [heads * (nope + v)][latent], the key rows of a head first;
 * y f32 [T][heads * (latent + rope)]. Unit: head. Never fold kv_b into q_b: other bits. Reads q, kv_b; writes y. */
#ifndef K3_OP_MLA_QLAT_H
#define K3_OP_MLA_QLAT_H

#include "body.h"

/* One head of one token: q [nope + rope], W_UK the head's key rows, y [latent + rope]. */
K3_FN void k3_qlat_head(K3Ctx *c, const float *q, const uint16_t *W_UK, uint32_t nope, uint32_t rope, uint32_t latent,
                        float *y, int round) {
    k3_cols_dot_bf16(c, W_UK, latent, nope, 0u, latent, q, y);
    K3_FOR(j, 0, rope) { y[latent + j] = q[nope + j]; }
    k3_round_columns(c, y, latent, 0u, latent, 1u, round);
}

K3_FN void k3_op_mla_qlat(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t nope = inst->param[K3_MLA_QLAT_NOPE], rope = inst->param[K3_MLA_QLAT_ROPE];
    const uint32_t latent = inst->param[K3_MLA_QLAT_LATENT], v = inst->param[K3_MLA_QLAT_V];
    const uint64_t q_width = (uint64_t)inst->n_units * (nope + rope);
    uint32_t t, h;
    for (t = 0; t < c->step->n_tokens; t++)
        for (h = u0; h < u1; h++) {
            const float *q = k3_in(c, inst, K3_MLA_QLAT_Q) + t * q_width + (uint64_t)h * (nope + rope);
            const uint16_t *W_UK = k3_bf16(c, inst, K3_MLA_QLAT_KV_B) + (uint64_t)h * (nope + v) * latent;
            float *y = k3_out(c, inst, K3_MLA_QLAT_Y) + (uint64_t)t * inst->width + (uint64_t)h * (latent + rope);
            k3_qlat_head(c, q, W_UK, nope, rope, latent, y, k3_flag(inst, K3_MLA_QLAT_ROUND));
        }
}

#endif

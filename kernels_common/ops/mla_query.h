/* y[h] = mla_qlat of head h of norm_gemv(x): a head's query, made and carried to the latent in one packet.
 *
 * Heads share the norm, which every slice makes again. Layout: x f32 [T][K], norm bf16 [K], w bf16
 * [heads * (nope + rope)][K], kv_b and y as in mla_qlat.h. Unit: head. Reads x, norm, w, kv_b; writes y. Scratch: T
 * normed rows and T queries of a head. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_MLA_QUERY_H
#define K3_OP_MLA_QUERY_H

#include "mla_qlat.h"
#include "rmsnorm.h"

/* One head of all tokens; normed [T][K], q [T][nope + rope] is work. */
K3_FN void k3_query_head(K3Ctx *c, const K3Inst *inst, uint32_t h, const float *normed, float *q) {
    const uint32_t K = inst->param[K3_MLA_QUERY_K], nope = inst->param[K3_MLA_QUERY_NOPE];
    const uint32_t rope = inst->param[K3_MLA_QUERY_ROPE], latent = inst->param[K3_MLA_QUERY_LATENT];
    const uint32_t n_tok = c->step->n_tokens, rows = nope + rope, of_head = nope + inst->param[K3_MLA_QUERY_V];
    const int round = k3_flag(inst, K3_MLA_QUERY_ROUND);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_MLA_QUERY_W) + (uint64_t)h * rows * K, K, 0u, rows, K, 1u, normed, K, n_tok, q,
                   rows, k3_flag(inst, K3_MLA_QUERY_NORM_ROUND));
    k3_round_columns(c, q, rows, 0u, rows, n_tok, round);
    K3_SYNC(c);
    k3_qlat_head(c, q, rows, k3_bf16(c, inst, K3_MLA_QUERY_KV_B) + (uint64_t)h * of_head * latent, nope, rope, latent, n_tok,
                 k3_out(c, inst, K3_MLA_QUERY_Y) + (uint64_t)h * (latent + rope), inst->width, round);
    K3_SYNC(c); /* the next head overwrites q */
}

K3_FN void k3_op_mla_query(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_MLA_QUERY_K], n_tok = c->step->n_tokens;
    const uint64_t rows = inst->param[K3_MLA_QUERY_NOPE] + inst->param[K3_MLA_QUERY_ROPE];
    const float *x = k3_in(c, inst, K3_MLA_QUERY_X);
    float *normed = k3_scratch(c, n_tok * (K + rows));
    uint32_t t, h;
    if (!normed) return;
    for (t = 0; t < n_tok; t++)
        k3_rmsnorm_row(c, x + (uint64_t)t * K, k3_bf16(c, inst, K3_MLA_QUERY_NORM), K, k3_f32_param(inst, K3_MLA_QUERY_EPS),
                       normed + (uint64_t)t * K, t, k3_flag(inst, K3_MLA_QUERY_NORM_ROUND));
    K3_SYNC(c);
    for (h = u0; h < u1; h++) k3_query_head(c, inst, h, normed, normed + (uint64_t)n_tok * K);
}

#endif

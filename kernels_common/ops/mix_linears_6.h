/* y_i[t][r] = rule 3 over row r of w_i with rmsnorm(mix[t]; norm, norm_eps), for linears that share their input.
 *
 * mix is attn_res of the prefix and a block part made before (attn_part.h). Every slice mixes and norms every token
 * again: two vectors read and a hand-off saved. Layout: prefix f32 [T][K], part f32 [T][K + K3_PART_EXTRA], res_norm,
 * res_proj, norm bf16 [K], w_i bf16 [rows_i][K], y_i f32 [T][rows_i]; a parameter word holds two row counts. Unit: row,
 * counted through all w. Reads all; writes every y. Scratch: (T + 1) K. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_MIX_LINEARS_6_H
#define K3_OP_MIX_LINEARS_6_H

#include "attn_part.h"

/* The operands lie in the same slots whatever the number of linears. */
K3_STATIC_ASSERT(K3_MIX_LINEARS_3_Y0 == K3_MIX_LINEARS_6_Y0 && K3_MIX_LINEARS_4_Y0 == K3_MIX_LINEARS_6_Y0, "one layout");
K3_STATIC_ASSERT(K3_MIX_LINEARS_3_W0 == K3_MIX_LINEARS_6_W0 && K3_MIX_LINEARS_4_W0 == K3_MIX_LINEARS_6_W0, "one layout");

/* Every token's normed mix, in scratch; 0 and a fault where that is too small. */
K3_FN float *k3_normed_mix(K3Ctx *c, const K3Inst *inst, uint32_t K, int round) {
    const float *prefix = k3_in(c, inst, K3_MIX_LINEARS_6_PREFIX), *part = k3_in(c, inst, K3_MIX_LINEARS_6_PART);
    float *work = k3_scratch(c, ((uint64_t)c->step->n_tokens + 1u) * K);
    K3Mix m;
    uint32_t t;
    if (!work || !k3_mix_begin(c, &m, 0, k3_bf16(c, inst, K3_MIX_LINEARS_6_RES_NORM),
                               k3_bf16(c, inst, K3_MIX_LINEARS_6_RES_PROJ), 0u, K,
                               k3_f32_param(inst, K3_MIX_LINEARS_6_EPS), round))
        return 0;
    for (t = 0; t < c->step->n_tokens; t++) {
        const float *o_B = part + (uint64_t)t * (K + K3_PART_EXTRA);
        float *row = work + ((uint64_t)t + 1u) * K;
        k3_mix_prefix(c, &m, o_B, o_B[K], o_B[K + 1u], prefix + (uint64_t)t * K, row, t);
        K3_SYNC(c);
        k3_rmsnorm_row(c, row, k3_bf16(c, inst, K3_MIX_LINEARS_6_NORM), K,
                       k3_f32_param(inst, K3_MIX_LINEARS_6_NORM_EPS), row, t, round);
    }
    K3_SYNC(c);
    return work + K;
}

/* round: mix, norm and every linear; head_round: the first linear, whatever the others do. */
K3_FN void k3_mix_linears(K3Ctx *c, const K3Inst *inst, const uint32_t *words, uint32_t n, uint32_t u0, uint32_t u1,
                          int round, int head_round) {
    const uint32_t K = inst->param[K3_MIX_LINEARS_6_K], n_tok = c->step->n_tokens;
    const float *x = k3_normed_mix(c, inst, K, round);
    uint32_t i, first = 0;
    if (!x) return;
    for (i = 0; i < n; i++) {
        const uint32_t rows = words[i / 2u] >> (16u * (i & 1u)) & 0xffffu;
        const uint32_t lo = u0 > first ? u0 : first, hi = k3_min(u1, first + rows);
        float *y = k3_out(c, inst, K3_MIX_LINEARS_6_Y0 + (i << K3_RUN_SHIFT));
        if (lo < hi) {
            k3_linear_bf16(c, k3_bf16(c, inst, K3_MIX_LINEARS_6_W0 + (i << K3_RUN_SHIFT)), K, lo - first, hi - first, K,
                           1u, x, K, n_tok, y, rows, round);
            k3_round_columns(c, y, rows, lo - first, hi - first, n_tok, i == 0u ? head_round : round);
        }
        first += rows;
    }
}

K3_FN void k3_op_mix_linears_6(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t words[3] = {inst->param[K3_MIX_LINEARS_6_ROWS01], inst->param[K3_MIX_LINEARS_6_ROWS23], inst->param[K3_MIX_LINEARS_6_ROWS45]};
    const int round = k3_flag(inst, K3_MIX_LINEARS_6_ROUND);
    k3_mix_linears(c, inst, words, 6u, u0, u1, round, round);
}

#endif

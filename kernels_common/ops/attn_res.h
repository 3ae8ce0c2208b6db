/* y = softmax-weighted mix of the finished blocks and the prefix; a copy of the prefix while there is no block.
 *
 *   f = res_norm * res_proj, once per element; score(v) = (sum v f) * inv_rms(v; eps), sums by rule 6
 *   blocks in order of creation: m_B = max, e_i = exp(s_i - m_B), s_B left to right, o_B = e_0 v_0, then fma
 *   prefix last: M = max(m_B, s_p), a = exp(m_B - M), b = exp(s_p - M)
 *   y = fma(a, o_B, b v_p) * r, r = 1 / fma(a, s_B, b)
 *
 * The norm enters the score only; the raw sources are mixed. The block part needs nothing of the prefix.
 * Layout: prefix, y f32 [T][width]; blocks f32 [n][max_tokens][width]; res_norm, res_proj bf16 [width]. Unit:
 * token. Reads all; writes y. Scratch: width + n_blocks. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_ATTN_RES_H
#define K3_OP_ATTN_RES_H

#include "rmsnorm.h"

typedef struct K3Mix {
    const float *blocks; /* block 0 of token 0 */
    const float *f;      /* [width] */
    float *e;            /* [n_blocks] */
    uint64_t block_stride;
    uint32_t n_blocks, width;
    float eps;
    int round; /* the mix is behind a rounding point; scores and the block part never are */
} K3Mix;

K3_FN float k3_mix_score(K3Ctx *c, const K3Mix *m, const float *v, uint32_t token) {
    const float dot = k3_axis_dot(c, v, m->f, m->width);
    return dot * k3_inverse_rms(c, v, m->width, m->eps, token);
}

/* Scores of the blocks into e, then e_i and their sum; returns m_B. Every lane computes the same scores. */
K3_FN float k3_mix_blocks(K3Ctx *c, const K3Mix *m, uint32_t token, float *sum) {
    const float *v = m->blocks + (uint64_t)token * m->width;
    float top = 0.0f, s = 0.0f;
    uint32_t i;
    for (i = 0; i < m->n_blocks; i++) {
        const float score = k3_mix_score(c, m, v + i * m->block_stride, token);
        top = i == 0u || score > top ? score : top;
        if (K3_LANE0) m->e[i] = score;
    }
    K3_SYNC(c);
    for (i = 0; i < m->n_blocks; i++) {
        const float e = k3_exp(m->e[i] - top);
        s = i == 0u ? e : s + e;
    }
    K3_SYNC(c); /* all lanes have read the scores */
    K3_FOR(k, 0, m->n_blocks) { m->e[k] = k3_exp(m->e[k] - top); }
    K3_SYNC(c);
    *sum = s;
    return top;
}

/* The block part of one token: o_B into y, s_B into *sum; returns m_B. A lane owns its columns of y. */
K3_FN float k3_mix_part(K3Ctx *c, const K3Mix *m, uint32_t token, float *K3_RESTRICT y, float *sum) {
    const float *v = m->blocks + (uint64_t)token * m->width;
    const float m_B = k3_mix_blocks(c, m, token, sum);
    uint32_t i;
    K3_FOR(j, 0, m->width) { y[j] = m->e[0] * v[j]; }
    for (i = 1; i < m->n_blocks; i++) {
        const float *K3_RESTRICT vi = v + i * m->block_stride;
        const float e = m->e[i];
        K3_FOR(j, 0, m->width) { y[j] = k3_fma(e, vi[j], y[j]); }
    }
    return m_B;
}

/* The prefix joins the block part o_B, which may be y. */
K3_FN void k3_mix_prefix(K3Ctx *c, const K3Mix *m, const float *o_B, float m_B, float s_B,
                         const float *K3_RESTRICT prefix, float *y, uint32_t token) {
    const float s_p = k3_mix_score(c, m, prefix, token);
    const float M = m_B > s_p ? m_B : s_p;
    const float a = k3_exp(m_B - M), b = k3_exp(s_p - M);
    const float r = 1.0f / k3_fma(a, s_B, b);
    K3_FOR(j, 0, m->width) { y[j] = k3_rnd(k3_fma(a, o_B[j], b * prefix[j]) * r, m->round); }
}

/* One token. */
K3_FN void k3_mix_row(K3Ctx *c, const K3Mix *m, const float *K3_RESTRICT prefix, float *K3_RESTRICT y,
                      uint32_t token) {
    float s_B, m_B;
    if (m->n_blocks == 0u) {
        K3_FOR(j, 0, m->width) { y[j] = k3_rnd(prefix[j], m->round); }
        return;
    }
    m_B = k3_mix_part(c, m, token, y, &s_B);
    k3_mix_prefix(c, m, y, m_B, s_B, prefix, y, token);
}

/* Fill the mix of an instruction; returns 0 (and leaves a fault) when scratch is short. */
K3_FN int k3_mix_begin(K3Ctx *c, K3Mix *m, const float *blocks, const uint16_t *norm, const uint16_t *proj,
                       uint32_t n_blocks, uint32_t width, float eps, int round) {
    float *f = k3_scratch(c, (uint64_t)width + n_blocks);
    if (!f) return 0;
    K3_FOR(j, 0, width) { f[j] = k3_bf16_to_f32(norm[j]) * k3_bf16_to_f32(proj[j]); }
    K3_SYNC(c);
    m->blocks = blocks;
    m->f = f;
    m->e = f + width;
    m->block_stride = (uint64_t)c->max_tokens * width;
    m->n_blocks = n_blocks;
    m->width = width;
    m->eps = eps;
    m->round = round;
    return 1;
}

K3_FN void k3_op_attn_res(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *prefix = k3_in(c, inst, K3_ATTN_RES_PREFIX);
    float *y = k3_out(c, inst, K3_ATTN_RES_Y);
    K3Mix m;
    uint32_t t;
    if (!k3_mix_begin(c, &m, k3_in(c, inst, K3_ATTN_RES_BLOCKS), k3_bf16(c, inst, K3_ATTN_RES_RES_NORM),
                      k3_bf16(c, inst, K3_ATTN_RES_RES_PROJ), inst->param[K3_ATTN_RES_N_BLOCKS], inst->width,
                      k3_f32_param(inst, K3_ATTN_RES_EPS), k3_flag(inst, K3_ATTN_RES_ROUND)))
        return;
    for (t = u0; t < k3_min(u1, c->step->n_tokens); t++) {
        k3_mix_row(c, &m, prefix + (uint64_t)t * m.width, y + (uint64_t)t * m.width, t);
        K3_SYNC(c); /* the next token overwrites the scores */
    }
}

#endif

/* y[t] = (best, its lowest index over the whole vocabulary, second best, 0) of this rank's logits.
 *
 * second equals best where two logits tie. Layout: logits f32 [T][vocab], y [T][4] words: f32, u32, f32, 0.
 * Unit: step; tokens from head_from on. Reads logits; writes y. Fault: NONFINITE, detail = token. */
#ifndef K3_OP_ARGMAX_H
#define K3_OP_ARGMAX_H

#include "body.h"

typedef struct K3Candidate {
    float best;
    uint32_t index;
    float second;
} K3Candidate;

K3_FN K3Candidate k3_candidate_read(const float *p) {
    K3Candidate a;
    a.best = p[0];
    a.index = k3_f32_to_bits(p[1]);
    a.second = p[2];
    return a;
}

K3_FN void k3_candidate_write(float *p, K3Candidate a) {
    p[0] = a.best;
    p[1] = k3_bits_to_f32(a.index); /* a move: as a number it would be a subnormal and flush */
    p[2] = a.second;
    p[3] = 0.0f;
}

K3_FN K3Candidate k3_candidate_row(K3Ctx *c, const float *logits, uint32_t n, uint32_t base, uint32_t token) {
    const float low = k3_bits_to_f32(K3_BITS_INF | 0x80000000u);
    K3Candidate a;
    uint32_t i;
    a.best = low;
    a.index = base;
    a.second = low;
    for (i = 0; i < n; i++) {
        const float v = logits[i];
        k3_check_finite(c, v, token);
        if (v > a.best) {
            a.second = a.best;
            a.best = v;
            a.index = base + i;
        } else if (v > a.second) {
            a.second = v;
        }
    }
    return a;
}

K3_FN void k3_op_argmax(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t n = inst->param[K3_ARGMAX_VOCAB], base = inst->param[K3_ARGMAX_VOCAB_BASE];
    const float *logits = k3_in(c, inst, K3_ARGMAX_LOGITS);
    float *y = k3_out(c, inst, K3_ARGMAX_Y);
    uint32_t t;
    (void)u0, (void)u1;
    if (!K3_LANE0) return;
    for (t = k3_first_token(c, 1u); t < c->step->n_tokens; t++)
        k3_candidate_write(y + (uint64_t)t * K3_CANDIDATE_WORDS,
                           k3_candidate_row(c, logits + (uint64_t)t * n, n, base, t));
}

#endif

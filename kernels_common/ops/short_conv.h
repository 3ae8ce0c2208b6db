/* y[t] = w0 x[t-3], then fma w1 x[t-2], fma w2 x[t-1], fma w3 x[t], per channel.
 *
 * x before the sequence is +0 and is multiplied like any other. Layout: x, y f32 [T][width], conv f32
 * [width][4] (tap 3 meets the current token), taps f32 [slots][3][width], row 0 the oldest. Unit: channel.
 * Reads x, conv, taps; writes y, taps. Tokens of a slot come in time order; position 0 clears its taps. */
#ifndef K3_OP_SHORT_CONV_H
#define K3_OP_SHORT_CONV_H

#include "silu.h"

/* Channels [j0, j1) of one token, channel j into y[j - j0]; a lane owns its channels. What may not overlap is named, or a
 * compiler has to go channel by channel. */
K3_FN void k3_conv_channels(K3Ctx *c, const float *K3_RESTRICT x, const float *K3_RESTRICT conv, float *taps, uint32_t width,
                            uint32_t j0, uint32_t j1, int first, float *K3_RESTRICT y) {
    float *K3_RESTRICT t0 = taps, *K3_RESTRICT t1 = taps + width, *K3_RESTRICT t2 = taps + 2u * (uint64_t)width;
    (void)c;
    K3_FOR(j, j0, j1) {
        const float x3 = first ? 0.0f : t0[j], x2 = first ? 0.0f : t1[j], x1 = first ? 0.0f : t2[j];
        const float *w = conv + 4u * (uint64_t)j;
        y[j - j0] = k3_fma(w[3], x[j], k3_fma(w[2], x1, k3_fma(w[1], x2, w[0] * x3)));
        t0[j] = x2;
        t1[j] = x1;
        t2[j] = x[j];
    }
}

K3_FN float *k3_conv_taps(const K3Ctx *c, const K3Inst *inst, uint32_t slot, uint32_t token) {
    return (float *)k3_tensor(c, inst, slot) + (uint64_t)c->step->slot[token] * 3u * inst->width;
}

#ifdef K3_ONE_LANE
#define K3_CONV_TILE 256u /* channels */

/* Tokens behind each other, one tile of channels: the state is what lies in x, and only the last of it is stored. */
typedef struct K3ConvTile {
    float w[4][K3_CONV_TILE], past[3][K3_CONV_TILE];
} K3ConvTile;

K3_INLINE void k3_conv_token(const K3ConvTile *s, const float *K3_RESTRICT x3, const float *K3_RESTRICT x2,
                             const float *K3_RESTRICT x1, const float *K3_RESTRICT x, uint32_t n, float *K3_RESTRICT y, int silu,
                             int round) {
    uint32_t j;
    for (j = 0; j < n; j++) {
        const float v = k3_fma(s->w[3][j], x[j], k3_fma(s->w[2][j], x1[j], k3_fma(s->w[1][j], x2[j], s->w[0][j] * x3[j])));
        y[j] = silu ? k3_rnd(k3_silu(v), round) : v;
    }
}

/* The input `back` tokens before token t of the run. */
K3_FN const float *k3_conv_input(const K3ConvTile *s, const float *x, uint32_t width, uint32_t t, uint32_t back) {
    return t >= back ? x + (uint64_t)(t - back) * width : s->past[t + 3u - back];
}

/* Channels [j0, j0 + n), n <= K3_CONV_TILE, of n_tok tokens; x and y of the first one. */
K3_INLINE void k3_conv_tile(const float *x, const float *conv, float *taps, uint32_t width, uint32_t j0, uint32_t n, int first,
                            uint32_t n_tok, float *y, int silu, int round) {
    K3ConvTile s;
    uint32_t j, k, t;
    x += j0;
    for (j = 0; j < n; j++)
        for (k = 0; k < 4u; k++) s.w[k][j] = conv[4u * (uint64_t)(j0 + j) + k];
    for (k = 0; k < 3u; k++)
        for (j = 0; j < n; j++) s.past[k][j] = first ? 0.0f : taps[(uint64_t)k * width + j0 + j];
    for (t = 0; t < n_tok; t++)
        k3_conv_token(&s, k3_conv_input(&s, x, width, t, 3u), k3_conv_input(&s, x, width, t, 2u),
                      k3_conv_input(&s, x, width, t, 1u), x + (uint64_t)t * width, n, y + (uint64_t)t * width + j0, silu, round);
    for (k = 0; k < 3u; k++) {
        const float *last = k3_conv_input(&s, x, width, n_tok, 3u - k);
        for (j = 0; j < n; j++) taps[(uint64_t)k * width + j0 + j] = last[j];
    }
}
#endif

/* Channels [j0, j1) of all tokens, silu'd and rounded if so; operands as SHORT_CONV and CONV_SILU have them. */
K3_INLINE void k3_conv_tokens(K3Ctx *c, const K3Inst *inst, uint32_t j0, uint32_t j1, const float *x, const float *conv,
                              uint32_t taps, float *y, int silu, int round) {
    const uint64_t width = inst->width;
    uint32_t t, n = 1u;
    for (t = 0; t < c->step->n_tokens; t += n) {
        const int first = c->step->position[t] == 0u;
        float *own = k3_conv_taps(c, inst, taps, t), *row = y + t * width;
#ifdef K3_ONE_LANE
        n = k3_run_of(c->step, t, c->step->n_tokens);
        if (n > 1u) {
            uint32_t j;
            for (j = j0; j < j1; j += K3_CONV_TILE)
                k3_conv_tile(x + t * width, conv, own, inst->width, j, k3_min(K3_CONV_TILE, j1 - j), first, n, row, silu, round);
            continue;
        }
#endif
        k3_conv_channels(c, x + t * width, conv, own, inst->width, j0, j1, first, row + j0);
        if (silu) {
            K3_FOR(j, j0, j1) { row[j] = k3_rnd(k3_silu(row[j]), round); }
        }
    }
}

K3_FN void k3_op_short_conv(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    k3_conv_tokens(c, inst, u0 * inst->unit_cols, u1 * inst->unit_cols, k3_in(c, inst, K3_SHORT_CONV_X),
                   k3_in(c, inst, K3_SHORT_CONV_CONV), K3_SHORT_CONV_TAPS, k3_out(c, inst, K3_SHORT_CONV_Y), 0, 0);
}

#endif

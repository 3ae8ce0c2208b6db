/* y[t] = w0 x[t-3], then fma w1 x[t-2], fma w2 x[t-1], fma w3 x[t], per channel.
 *
 * x before the sequence is +0 and is multiplied like any other. Layout: x, y f32 [T][width], conv f32
 * [width][4] (tap 3 meets the current token), taps f32 [slots][3][width], row 0 the oldest. Unit: channel.
 * Reads x, conv, taps; writes y, taps. Tokens of a slot come in time order; position 0 clears its taps. */
#ifndef K3_OP_SHORT_CONV_H
#define K3_OP_SHORT_CONV_H

#include "body.h"

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

K3_FN void k3_op_short_conv(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *conv = k3_in(c, inst, K3_SHORT_CONV_CONV);
    const uint32_t j0 = u0 * inst->unit_cols;
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const float *x = k3_in(c, inst, K3_SHORT_CONV_X) + (uint64_t)t * inst->width;
        float *y = k3_out(c, inst, K3_SHORT_CONV_Y) + (uint64_t)t * inst->width;
        float *taps = k3_conv_taps(c, inst, K3_SHORT_CONV_TAPS, t);
        const int first = c->step->position[t] == 0u;
        k3_conv_channels(c, x, conv, taps, inst->width, j0, u1 * inst->unit_cols, first, y + j0);
    }
}

#endif

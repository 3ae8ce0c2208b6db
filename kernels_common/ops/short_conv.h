/* y[t] = w0 x[t-3], then fma w1 x[t-2], fma w2 x[t-1], fma w3 x[t], per channel.
 *
 * x before the sequence is +0 and is multiplied like any other. Layout: x, y f32 [T][width], conv f32
 * [width][4] (tap 3 meets the current token), taps f32 [slots][3][width], row 0 the oldest. Unit: channel.
 * Reads x, conv, taps; writes y, taps. Tokens of a slot come in time order; position 0 clears its taps. */
#ifndef K3_OP_SHORT_CONV_H
#define K3_OP_SHORT_CONV_H

#include "body.h"

/* Channel j of one token. taps: row 0 of the slot. Shifts x in; a lane owns its channels at every token. */
K3_FN float k3_conv_channel(float x, const float *conv, float *taps, uint32_t width, uint32_t j, int first) {
    const float x3 = first ? 0.0f : taps[j];
    const float x2 = first ? 0.0f : taps[width + j];
    const float x1 = first ? 0.0f : taps[2u * width + j];
    taps[j] = x2;
    taps[width + j] = x1;
    taps[2u * width + j] = x;
    return k3_fma(conv[4u * j + 3u], x,
                  k3_fma(conv[4u * j + 2u], x1, k3_fma(conv[4u * j + 1u], x2, conv[4u * j] * x3)));
}

K3_FN float *k3_conv_taps(const K3Ctx *c, const K3Inst *inst, uint32_t slot, uint32_t token) {
    return (float *)k3_tensor(c, inst, slot) + (uint64_t)c->step->slot[token] * 3u * inst->width;
}

K3_FN void k3_op_short_conv(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *conv = k3_in(c, inst, K3_SHORT_CONV_CONV);
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const float *x = k3_in(c, inst, K3_SHORT_CONV_X) + (uint64_t)t * inst->width;
        float *y = k3_out(c, inst, K3_SHORT_CONV_Y) + (uint64_t)t * inst->width;
        float *taps = k3_conv_taps(c, inst, K3_SHORT_CONV_TAPS, t);
        const int first = c->step->position[t] == 0u;
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) {
            y[j] = k3_conv_channel(x[j], conv, taps, inst->width, j, first);
        }
    }
}

#endif

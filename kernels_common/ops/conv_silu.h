/* y = silu(short_conv(x)).
 *
 * Layout, state and order: short_conv.h. Unit: channel. Reads x, conv, taps; writes y, taps. */
#ifndef K3_OP_CONV_SILU_H
#define K3_OP_CONV_SILU_H

#include "short_conv.h"

K3_FN void k3_op_conv_silu(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *conv = k3_in(c, inst, K3_CONV_SILU_CONV);
    const int round = k3_flag(inst, K3_CONV_SILU_ROUND);
    const uint32_t j0 = u0 * inst->unit_cols, j1 = u1 * inst->unit_cols;
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const float *x = k3_in(c, inst, K3_CONV_SILU_X) + (uint64_t)t * inst->width;
        float *y = k3_out(c, inst, K3_CONV_SILU_Y) + (uint64_t)t * inst->width;
        float *taps = k3_conv_taps(c, inst, K3_CONV_SILU_TAPS, t);
        const int first = c->step->position[t] == 0u;
        k3_conv_channels(c, x, conv, taps, inst->width, j0, j1, first, y + j0);
        K3_FOR(j, j0, j1) { y[j] = k3_rnd(k3_silu(y[j]), round); }
    }
}

#endif

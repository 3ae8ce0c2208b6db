/* y = silu(short_conv(x)).
 *
 * Layout, state and order: short_conv.h. Unit: channel. Reads x, conv, taps; writes y, taps. */
#ifndef K3_OP_CONV_SILU_H
#define K3_OP_CONV_SILU_H

#include "short_conv.h"

K3_FN void k3_op_conv_silu(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *x = k3_in(c, inst, K3_CONV_SILU_X), *conv = k3_in(c, inst, K3_CONV_SILU_CONV);
    const uint32_t j0 = u0 * inst->unit_cols, j1 = u1 * inst->unit_cols;
    float *y = k3_out(c, inst, K3_CONV_SILU_Y);
    if (k3_flag(inst, K3_CONV_SILU_ROUND)) /* each its own loop, with nothing to ask in it */
        k3_conv_tokens(c, inst, j0, j1, x, conv, K3_CONV_SILU_TAPS, y, 1, 1);
    else
        k3_conv_tokens(c, inst, j0, j1, x, conv, K3_CONV_SILU_TAPS, y, 1, 0);
}

#endif

/* y = residual + all_reduce(x).
 *
 * Layout: every operand [T][width] f32. Unit: column; a slice takes its columns of every token.
 * Reads residual; x of every rank; writes y. */
#ifndef K3_OP_ALL_REDUCE_ADD_H
#define K3_OP_ALL_REDUCE_ADD_H

#include "body.h"

K3_FN void k3_op_all_reduce_add(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const K3Peers x = k3_peers(c, inst, K3_ALL_REDUCE_ADD_X);
    const float *residual = k3_in(c, inst, K3_ALL_REDUCE_ADD_RESIDUAL);
    const int round = k3_flag(inst, K3_ALL_REDUCE_ADD_ROUND);
    float *y = k3_out(c, inst, K3_ALL_REDUCE_ADD_Y);
    const uint32_t j0 = u0 * inst->unit_cols, j1 = u1 * inst->unit_cols;
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t at = (uint64_t)t * inst->width + j0;
        k3_reduce_columns(&x, at, 0, residual + at, j1 - j0, y + at, round);
    }
}

#endif

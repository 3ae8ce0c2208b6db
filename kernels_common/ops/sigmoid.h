/* y = 1 / (1 + exp(-x)).
 *
 * Layout: every operand [T][width] f32. Unit: column; a slice takes its columns of every token.
 * Reads x; writes y. */
#ifndef K3_OP_SIGMOID_H
#define K3_OP_SIGMOID_H

#include "body.h"

K3_FN void k3_op_sigmoid(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *K3_RESTRICT x = k3_in(c, inst, K3_SIGMOID_X);
    const int round = k3_flag(inst, K3_SIGMOID_ROUND);
    float *K3_RESTRICT y = k3_out(c, inst, K3_SIGMOID_Y);
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t row = (uint64_t)t * inst->width;
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) { y[row + j] = k3_rnd(k3_sigmoid(x[row + j]), round); }
    }
}

#endif

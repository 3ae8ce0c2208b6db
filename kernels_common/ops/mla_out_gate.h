/* y = o * sigmoid(gate). No norm on o, unlike KDA's gate of the same tensor name.
 *
 * Layout: every operand [T][width] f32. Unit: column; a slice takes its columns of every token.
 * Reads o, gate; writes y. */
#ifndef K3_OP_MLA_OUT_GATE_H
#define K3_OP_MLA_OUT_GATE_H

#include "body.h"

K3_FN void k3_op_mla_out_gate(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *K3_RESTRICT o = k3_in(c, inst, K3_MLA_OUT_GATE_O);
    const float *K3_RESTRICT gate = k3_in(c, inst, K3_MLA_OUT_GATE_GATE);
    const int round = k3_flag(inst, K3_MLA_OUT_GATE_ROUND);
    float *K3_RESTRICT y = k3_out(c, inst, K3_MLA_OUT_GATE_Y);
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t row = (uint64_t)t * inst->width;
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) {
            y[row + j] = k3_rnd(o[row + j] * k3_rnd(k3_sigmoid(gate[row + j]), round), round);
        }
    }
}

#endif

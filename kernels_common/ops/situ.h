/* y = (softcap(gate; beta) * sigmoid(gate)) * softcap(up; linear_beta). Wrong: a sigmoid of the capped gate.
 *
 * Layout: every operand [T][width] f32. Unit: column; a slice takes its columns of every token.
 * Reads gate, up; writes y. */
#ifndef K3_OP_SITU_H
#define K3_OP_SITU_H

#include "body.h"

K3_FN void k3_op_situ(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *K3_RESTRICT gate = k3_in(c, inst, K3_SITU_GATE);
    const float *K3_RESTRICT up = k3_in(c, inst, K3_SITU_UP);
    const float beta = k3_f32_param(inst, K3_SITU_BETA), linear = k3_f32_param(inst, K3_SITU_LINEAR_BETA);
    const int round = k3_flag(inst, K3_SITU_ROUND);
    float *K3_RESTRICT y = k3_out(c, inst, K3_SITU_Y);
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t row = (uint64_t)t * inst->width;
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) {
            y[row + j] = k3_rnd(k3_situ(gate[row + j], up[row + j], beta, linear), round);
        }
    }
}

#endif

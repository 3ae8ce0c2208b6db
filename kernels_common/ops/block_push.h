/* blocks[index] = prefix: a move of the raw layer input (not of the mix).
 *
 * Layout: prefix f32 [T][width], blocks f32 [n][max_tokens][width]. Unit: column.
 * Reads prefix; writes blocks[index]. */
#ifndef K3_OP_BLOCK_PUSH_H
#define K3_OP_BLOCK_PUSH_H

#include "body.h"

/* Where a finished block lies among the blocks. */
K3_FN float *k3_block(const K3Ctx *c, const K3Inst *inst, uint32_t blocks, uint32_t index) {
    return k3_out(c, inst, blocks) + (uint64_t)inst->param[index] * c->max_tokens * inst->width;
}

K3_FN void k3_op_block_push(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const float *prefix = k3_in(c, inst, K3_BLOCK_PUSH_PREFIX);
    float *block = k3_block(c, inst, K3_BLOCK_PUSH_BLOCKS, K3_BLOCK_PUSH_INDEX);
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint64_t row = (uint64_t)t * inst->width;
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) { block[row + j] = prefix[row + j]; }
    }
}

#endif

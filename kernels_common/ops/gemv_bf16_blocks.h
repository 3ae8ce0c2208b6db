/* y[t][r] = tree over this rank's n_blocks blocks of row r, each block by rule 3 (rule 5).
 *
 * Layout: w bf16 [rows][K], x f32 [T][K], y f32 [T][width]; K and n_blocks are this rank's: 8 / ranks blocks.
 * Unit: row. y is a subtree, to be reduced over ranks. Reads x, w; writes y. */
#ifndef K3_OP_GEMV_BF16_BLOCKS_H
#define K3_OP_GEMV_BF16_BLOCKS_H

#include "body.h"

K3_FN void k3_op_gemv_bf16_blocks(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t K = inst->param[K3_GEMV_BF16_BLOCKS_K], n_blocks = inst->param[K3_GEMV_BF16_BLOCKS_N_BLOCKS];
    const float *x = k3_in(c, inst, K3_GEMV_BF16_BLOCKS_X);
    k3_same_x(c, x);
    k3_linear_bf16(c, k3_bf16(c, inst, K3_GEMV_BF16_BLOCKS_W), K, u0, u1, K, n_blocks, x, K, c->step->n_tokens,
                   k3_out(c, inst, K3_GEMV_BF16_BLOCKS_Y), inst->width, k3_flag(inst, K3_GEMV_BF16_BLOCKS_X_BF16));
}

#endif

/* y[t] = table[token_id[t]]: a move, so subnormal weights arrive as they are stored.
 *
 * Layout: table bf16 [vocab][width], y f32 [T][width]. Unit: column.
 * Reads the step's token ids and table; writes y. Fault: RANGE, detail = the token's place in the step. */
#ifndef K3_OP_EMBED_BF16_H
#define K3_OP_EMBED_BF16_H

#include "body.h"

/* The columns of units [u0, u1) of every token's row of the table, to y f32 [T][width]. */
K3_FN void k3_embed(K3Ctx *c, const K3Inst *inst, const uint16_t *table, uint32_t vocab, float *y, uint32_t u0, uint32_t u1) {
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t id = c->step->token_id[t];
        const uint16_t *row = table + (uint64_t)id * inst->width;
        float *out = y + (uint64_t)t * inst->width;
        if (id >= vocab) {
            k3_trap(c, K3_FAULT_RANGE, t);
            return;
        }
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) { out[j] = k3_bf16_to_f32(row[j]); }
    }
}

K3_FN void k3_op_embed_bf16(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    k3_embed(c, inst, k3_bf16(c, inst, K3_EMBED_BF16_TABLE), inst->param[K3_EMBED_BF16_VOCAB],
             k3_out(c, inst, K3_EMBED_BF16_Y), u0, u1);
}

#endif

/* blocks[index] = table[token_id[t]]: a move, as embed_bf16.h and block_push.h one after the other.
 *
 * Layout: table bf16 [vocab][width], blocks f32 [n][max_tokens][width]. Unit: column.
 * Reads the step's token ids and table; writes blocks[index]. Fault: RANGE, detail = the token's place in the step. */
#ifndef K3_OP_EMBED_PUSH_H
#define K3_OP_EMBED_PUSH_H

#include "body.h"

K3_FN void k3_op_embed_push(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint16_t *table = k3_bf16(c, inst, K3_EMBED_PUSH_TABLE);
    float *block = k3_out(c, inst, K3_EMBED_PUSH_BLOCKS) +
                   (uint64_t)inst->param[K3_EMBED_PUSH_INDEX] * c->max_tokens * inst->width;
    uint32_t t;
    for (t = 0; t < c->step->n_tokens; t++) {
        const uint32_t id = c->step->token_id[t];
        const uint16_t *row = table + (uint64_t)id * inst->width;
        float *out = block + (uint64_t)t * inst->width;
        if (id >= inst->param[K3_EMBED_PUSH_VOCAB]) {
            k3_trap(c, K3_FAULT_RANGE, t);
            return;
        }
        K3_FOR(j, u0 * inst->unit_cols, u1 * inst->unit_cols) { out[j] = k3_bf16_to_f32(row[j]); }
    }
}

#endif

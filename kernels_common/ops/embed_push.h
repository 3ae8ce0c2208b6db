/* blocks[index] = table[token_id[t]]: a move, as embed_bf16.h and block_push.h one after the other.
 *
 * Layout: table bf16 [vocab][width], blocks f32 [n][max_tokens][width]. Unit: column.
 * Reads the step's token ids and table; writes blocks[index]. Fault: RANGE, detail = the token's place in the step. */
#ifndef K3_OP_EMBED_PUSH_H
#define K3_OP_EMBED_PUSH_H

#include "block_push.h"
#include "embed_bf16.h"

K3_FN void k3_op_embed_push(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    k3_embed(c, inst, k3_bf16(c, inst, K3_EMBED_PUSH_TABLE), inst->param[K3_EMBED_PUSH_VOCAB],
             k3_block(c, inst, K3_EMBED_PUSH_BLOCKS, K3_EMBED_PUSH_INDEX), u0, u1);
}

#endif

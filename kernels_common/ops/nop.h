/* Nothing: a packet that only orders others.
 *
 * Reads and writes no memory. */
#ifndef K3_OP_NOP_H
#define K3_OP_NOP_H

#include "body.h"

K3_FN void k3_op_nop(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    (void)c, (void)inst, (void)u0, (void)u1;
}

#endif

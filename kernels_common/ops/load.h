/* Bring weight w from its file to its place in the ring of weights.
 *
 * Nothing is computed: an interpreter that serves it reads the slice's blocks [u0, u1) of the pages that enclose the
 * tensor (kernels_cpu/residency.c), and this body says so in the table of handlers. Unit: block of LOAD_BLOCK_BYTES.
 * Writes w. */
#ifndef K3_OP_LOAD_H
#define K3_OP_LOAD_H

#include "body.h"

K3_FN void k3_op_load(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    (void)c;
    (void)inst;
    (void)u0;
    (void)u1;
}

#endif

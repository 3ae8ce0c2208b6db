/* 4 linears of one normed mix: mix_linears_6.h. The first is the router's, which never rounds. */
#ifndef K3_OP_MIX_LINEARS_4_H
#define K3_OP_MIX_LINEARS_4_H

#include "mix_linears_6.h"

K3_FN void k3_op_mix_linears_4(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t words[2] = {inst->param[K3_MIX_LINEARS_4_ROWS01], inst->param[K3_MIX_LINEARS_4_ROWS23]};
    k3_mix_linears(c, inst, words, 4u, u0, u1, k3_flag(inst, K3_MIX_LINEARS_4_ROUND),
                   k3_flag(inst, K3_MIX_LINEARS_4_HEAD_ROUND));
}

#endif

/* 3 linears of one normed mix: mix_linears_6.h. */
#ifndef K3_OP_MIX_LINEARS_3_H
#define K3_OP_MIX_LINEARS_3_H

#include "mix_linears_6.h"

K3_FN void k3_op_mix_linears_3(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t words[2] = {inst->param[K3_MIX_LINEARS_3_ROWS01], inst->param[K3_MIX_LINEARS_3_ROWS2]};
    const int round = k3_flag(inst, K3_MIX_LINEARS_3_ROUND);
    k3_mix_linears(c, inst, words, 3u, u0, u1, round, round);
}

#endif

/* y = residual + (all_gather(up) + all_reduce(x)).
 *
 * Layout: reduce_gather.h; residual f32 [T][width]. Unit: column.
 * Reads residual, every rank's up and x; writes y. */
#ifndef K3_OP_REDUCE_GATHER_ADD_H
#define K3_OP_REDUCE_GATHER_ADD_H

#include "all_gather.h"

K3_FN void k3_op_reduce_gather_add(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t shard_cols = inst->param[K3_REDUCE_GATHER_ADD_SHARD_COLS];
    const K3Peers x = k3_peers(c, inst, K3_REDUCE_GATHER_ADD_X);
    const float *residual = k3_in(c, inst, K3_REDUCE_GATHER_ADD_RESIDUAL);
    const int round = k3_flag(inst, K3_REDUCE_GATHER_ADD_ROUND);
    float *y = k3_out(c, inst, K3_REDUCE_GATHER_ADD_Y);
    uint32_t t, r;
    for (t = 0; t < c->step->n_tokens; t++)
        for (r = 0; r < c->n_ranks; r++) {
            const K3Shard s = k3_shard(c, inst, K3_REDUCE_GATHER_ADD_UP, shard_cols, r, t, u0 * inst->unit_cols,
                                       u1 * inst->unit_cols);
            const uint64_t at = (uint64_t)t * inst->width + s.lo;
            if (s.lo < s.hi)
                k3_reduce_columns(&x, at, s.row + (s.lo - r * shard_cols), residual + at, s.hi - s.lo, y + at, round);
        }
}

#endif

/* y = all_gather(up) + all_reduce(x).
 *
 * Layout: up of every rank f32 [T][shard_cols], x of every rank and y f32 [T][width]. Unit: column.
 * Reads every rank's up and x; writes y. */
#ifndef K3_OP_REDUCE_GATHER_H
#define K3_OP_REDUCE_GATHER_H

#include "all_gather.h"

K3_FN void k3_op_reduce_gather(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t shard_cols = inst->param[K3_REDUCE_GATHER_SHARD_COLS];
    const K3Peers x = k3_peers(c, inst, K3_REDUCE_GATHER_X);
    const int round = k3_flag(inst, K3_REDUCE_GATHER_ROUND);
    float *y = k3_out(c, inst, K3_REDUCE_GATHER_Y);
    uint32_t t, r;
    for (t = 0; t < c->step->n_tokens; t++)
        for (r = 0; r < c->n_ranks; r++) {
            const K3Shard s = k3_shard(c, inst, K3_REDUCE_GATHER_UP, shard_cols, r, t, u0 * inst->unit_cols,
                                       u1 * inst->unit_cols);
            const uint64_t row = (uint64_t)t * inst->width;
            K3_FOR(j, s.lo, s.hi) {
                y[row + j] = k3_rnd(s.row[j - r * shard_cols] + k3_rnd(k3_peer_sum(&x, row + j), round), round);
            }
        }
}

#endif

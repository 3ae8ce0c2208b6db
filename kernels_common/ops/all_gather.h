/* y = the ranks' x side by side: a move.
 *
 * Layout: x of every rank f32 [T][shard_cols], y f32 [T][ranks * shard_cols]. Unit: column of y.
 * Reads every rank's x; writes y. */
#ifndef K3_OP_ALL_GATHER_H
#define K3_OP_ALL_GATHER_H

#include "body.h"

/* Columns [lo, hi) that lie in rank r's shard, and that shard's row of token t less the shard's first column. */
typedef struct K3Shard {
    uint32_t lo, hi;
    const float *row;
} K3Shard;

K3_FN K3Shard k3_shard(const K3Ctx *c, const K3Inst *inst, uint32_t slot, uint32_t shard_cols, uint32_t r,
                       uint32_t t, uint32_t c0, uint32_t c1) {
    K3Shard s;
    const uint32_t first = r * shard_cols;
    s.lo = c0 > first ? c0 : first;
    s.hi = k3_min(c1, first + shard_cols);
    s.row = k3_peer(c, inst, slot, r) + (uint64_t)t * shard_cols;
    return s;
}

K3_FN void k3_op_all_gather(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t shard_cols = inst->param[K3_ALL_GATHER_SHARD_COLS];
    uint32_t t, r;
    for (t = 0; t < c->step->n_tokens; t++)
        for (r = 0; r < c->n_ranks; r++) {
            const K3Shard s = k3_shard(c, inst, K3_ALL_GATHER_X, shard_cols, r, t, u0 * inst->unit_cols,
                                       u1 * inst->unit_cols);
            float *y = k3_out(c, inst, K3_ALL_GATHER_Y) + (uint64_t)t * inst->width;
            K3_FOR(j, s.lo, s.hi) { y[j] = s.row[j - r * shard_cols]; }
        }
}

#endif

/* y[t] = (best, lowest index, second best) over all ranks' candidates.
 *
 * Layout: x of every rank and y [T][4] words as argmax.h. Unit: step; tokens from head_from on. The second best
 * is global: the best of the losers or the winner's own second. Reads every rank's x; writes y. */
#ifndef K3_OP_ARGMAX_FOLD_H
#define K3_OP_ARGMAX_FOLD_H

#include "argmax.h"

K3_FN K3Candidate k3_candidate_merge(K3Candidate a, K3Candidate b) {
    const int b_wins = b.best > a.best || (b.best == a.best && b.index < a.index);
    const K3Candidate win = b_wins ? b : a, lose = b_wins ? a : b;
    K3Candidate r = win;
    r.second = lose.best > win.second ? lose.best : win.second;
    return r;
}

K3_FN void k3_op_argmax_fold(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    uint32_t t, r;
    (void)u0, (void)u1;
    if (!K3_LANE0) return;
    for (t = k3_first_token(c, 1u); t < c->step->n_tokens; t++) {
        const uint64_t at = (uint64_t)t * K3_CANDIDATE_WORDS;
        K3Candidate a = k3_candidate_read(k3_peer(c, inst, K3_ARGMAX_FOLD_X, 0u) + at);
        for (r = 1; r < c->n_ranks; r++)
            a = k3_candidate_merge(a, k3_candidate_read(k3_peer(c, inst, K3_ARGMAX_FOLD_X, r) + at));
        k3_candidate_write(k3_out(c, inst, K3_ARGMAX_FOLD_Y) + at, a);
    }
}

#endif

/* The experts that a step's tokens chose, one after the other, each with the tokens that wait for it: a chunk reads every
 * expert once. Not an op; the expert ops share it.
 *
 * Each token is served slot by slot, and a route's ids ascend, so the next expert is the least of the ids that the
 * tokens are at. What a token computes, and in which order, is what it would be alone. */
#ifndef K3_OP_MOE_UNION_H
#define K3_OP_MOE_UNION_H

#include "body.h"

#define K3_EXPERT_TOKENS 32u /* tokens that an expert serves at a time */
#define K3_UNION_NONE 0xffffffffu

typedef struct K3Union {
    const uint32_t *ids; /* slot 0 of token 0; the next token's is 2 top_k words on */
    uint32_t *cursor;    /* [n_tok] slot that a token is at */
    uint32_t *at;        /* [K3_EXPERT_TOKENS] token * top_k + slot of those served now */
    uint32_t *tokens;    /* [K3_EXPERT_TOKENS] their tokens */
    uint32_t n_tok, top_k;
} K3Union;

/* Words of work for k3_union_begin, at most. */
#define K3_UNION_WORDS(n_tok) ((uint64_t)(n_tok) + 2u * K3_EXPERT_TOKENS)

K3_FN void k3_union_begin(K3Ctx *c, K3Union *u, const uint32_t *ids, uint32_t top_k, float *work) {
    u->ids = ids;
    u->top_k = top_k;
    u->n_tok = c->step->n_tokens;
    u->at = (uint32_t *)work;
    u->tokens = u->at + K3_EXPERT_TOKENS;
    u->cursor = u->tokens + K3_EXPERT_TOKENS;
}

/* Every token back at its first slot. */
K3_FN void k3_union_rewind(K3Ctx *c, const K3Union *u) {
    K3_FOR(t, 0, u->n_tok) { u->cursor[t] = 0u; }
    K3_SYNC(c);
}

/* Whether an op that was interrupted has done its n-th step; else it is about to, or to be interrupted before it. */
#ifdef K3_EXPERTS_COME
K3_FN int k3_was_done(const K3Ctx *c, uint32_t n) { return n < c->resume; }
K3_FN void k3_note_done(K3Ctx *c, uint32_t n) { c->resume = n + 1u; }
K3_FN void k3_await(K3Ctx *c, const K3Expert *expert) { c->awaits = expert; }
#else
K3_FN int k3_was_done(const K3Ctx *c, uint32_t n) { (void)c; (void)n; return 0; }
K3_FN void k3_note_done(K3Ctx *c, uint32_t n) { (void)c; (void)n; }
K3_FN void k3_await(K3Ctx *c, const K3Expert *expert) { (void)c; (void)expert; }
#endif

/* Whether an expert's bytes are in memory; leaves a fault, or what is to be waited for. Looked at where they are read: nobody
 * has seen a route that an op makes itself, and a fetch that chose otherwise would have the body read anywhere. */
K3_FN int k3_is_here(K3Ctx *c, const K3Expert *experts, uint32_t e) {
    if (k3_is_coming(&experts[e])) {
        k3_await(c, &experts[e]);
        return 0;
    }
    if (experts[e].packed != 0 && experts[e].scale != 0) return 1;
    k3_trap(c, K3_FAULT_ABSENT, e);
    return 0;
}

K3_FN uint32_t k3_union_id(const K3Union *u, uint32_t t) {
    const uint32_t slot = u->cursor[t];
    return slot < u->top_k ? u->ids[2u * (uint64_t)u->top_k * t + slot] : K3_UNION_NONE;
}

/* The expert that k3_union_next would return now, or K3_UNION_NONE: for hints. */
K3_FN uint32_t k3_union_peek(const K3Union *u) {
    uint32_t t, least = K3_UNION_NONE;
    for (t = 0; t < u->n_tok; t++) least = k3_min(least, k3_union_id(u, t));
    return least;
}

/* The next expert, into *expert, and the tokens it serves, into at and tokens; returns their number, 0 at the end. */
K3_FN uint32_t k3_union_next(K3Ctx *c, const K3Union *u, uint32_t *expert) {
    uint32_t t, n = 0;
    const uint32_t least = k3_union_peek(u);
    for (t = 0; t < u->n_tok && least != K3_UNION_NONE; t++) n += k3_union_id(u, t) == least;
    n = k3_min(n, K3_EXPERT_TOKENS);
    K3_SYNC(c); /* all lanes have read the cursors, and are done with the tokens served before */
    if (K3_LANE0) {
        uint32_t i = 0;
        for (t = 0; i < n; t++)
            if (k3_union_id(u, t) == least) {
                u->tokens[i] = t;
                u->at[i++] = t * u->top_k + u->cursor[t]++;
            }
    }
    K3_SYNC(c);
    *expert = least;
    return n;
}

/* The one it would return after k3_union_rewind. */
K3_FN uint32_t k3_union_first(const K3Union *u) {
    uint32_t t, least = u->ids[0];
    for (t = 1; t < u->n_tok; t++) least = k3_min(least, u->ids[2u * (uint64_t)u->top_k * t]);
    return least;
}

#endif

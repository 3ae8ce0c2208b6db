/* One head of one token from its context to its gated values: for the ops that go head by head. */
#ifndef K3_MLA_UV_HEAD_H
#define K3_MLA_UV_HEAD_H

#include "body.h"

/* W_UV: the head's v value rows; ctx [latent], visible; gate and y [v]. */
K3_FN void k3_uv_gate_head(K3Ctx *c, const uint16_t *W_UV, uint32_t latent, uint32_t v, const float *ctx, const float *gate,
                           float *y, int round) {
    k3_linear_bf16(c, W_UV, latent, 0u, v, latent, 1u, ctx, latent, 1u, y, v, round);
    k3_round_columns(c, y, v, 0u, v, 1u, round);
    K3_SYNC(c);
    K3_FOR(j, 0, v) { y[j] = k3_rnd(y[j] * k3_rnd(k3_sigmoid(gate[j]), round), round); }
}

#endif

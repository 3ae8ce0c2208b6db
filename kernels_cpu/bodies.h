/* The op bodies as tables, one for each leaf set; ops_body.c is compiled once for each. */
#ifndef K3_CPU_BODIES_H
#define K3_CPU_BODIES_H

#include "image.h"

typedef void (*K3OpFn)(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1);

typedef struct K3Bodies {
    const char *name;
    K3OpFn op[K3_N_PHASES][K3_N_OPCODES]; /* 0: no handler, a trap */
    /* Sum over words i of k3_mix(word ^ k3_mix(key + i)). */
    uint64_t (*digest)(const uint32_t *words, uint64_t n, uint64_t key);
} K3Bodies;

extern const K3Bodies k3_bodies_scalar, k3_bodies_avx2, k3_bodies_avx512;

#endif

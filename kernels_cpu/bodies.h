/* The op bodies as tables, one for each leaf set; ops_body.c is compiled once for each. */
#ifndef K3_CPU_BODIES_H
#define K3_CPU_BODIES_H

#include "image.h"

typedef void (*K3OpFn)(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1);

/* The leaves that `--measure` times. Index 1: X of which every element is a bf16. */
typedef struct K3LeafTable {
    void (*rows_bf16[2])(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K, uint32_t n_blocks,
                         const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy);
    void (*rows_mxfp4[2])(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K, uint32_t n_blocks,
                          const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy);
    void (*blocks_mxfp4[2])(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K, uint32_t n_blocks,
                            const float *X, float *D);
} K3LeafTable;

typedef struct K3Bodies {
    const char *name;
    K3LeafTable leaf;
    uint32_t (*self_test)(void); /* how much of its arithmetic is wrong on this CPU; 0: nothing to ask */
    /* `rounds` times vdpbf16ps in each of independent accumulators; returns the fused multiply-adds. 0: no leaf uses it. */
    uint64_t (*pairs)(uint64_t rounds, float *sink);
    K3OpFn op[K3_N_PHASES][K3_N_OPCODES]; /* 0: no handler, a trap */
    /* Sum over words i of k3_mix(word ^ k3_mix(key + i)). */
    uint64_t (*digest)(const uint32_t *words, uint64_t n, uint64_t key);
} K3Bodies;

extern const K3Bodies k3_bodies_scalar, k3_bodies_avx2, k3_bodies_avx512, k3_bodies_avx512_bf16;

#endif

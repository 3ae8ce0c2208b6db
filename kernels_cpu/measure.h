/* `k3-cpu --measure`: times single kernels and plain reading, one command a line (measure.c says which). */
#ifndef K3_CPU_MEASURE_H
#define K3_CPU_MEASURE_H

#include "dialect.h"

typedef struct K3MeasureLoops {
    /* n_streams 1 or 4; `ahead`: with software prefetch. Returns something that depends on every byte. */
    uint64_t (*read)(const char *p, uint64_t bytes, uint32_t n_streams, int ahead);
    /* `rounds` times a fused multiply-add in each of independent accumulators. Returns their number in all. */
    uint64_t (*fma)(uint64_t rounds, float *sink);
    void (*peer_bf16)(const uint16_t *W, uint32_t n_rows, uint32_t K, const double *x, float *y);
    void (*peer_mxfp4)(const uint8_t *W, const uint8_t *S, uint32_t n_rows, uint32_t K, const double *x, float *y);
} K3MeasureLoops;

extern const K3MeasureLoops k3_measure_plain, k3_measure_avx2, k3_measure_avx512;

/* Serve commands from stdin until it ends. `argv` is what follows --measure. Returns the exit code. */
int k3_measure(int argc, char **argv);

/* --measure-io (measure_io.c): likewise. */
int k3_measure_io(int argc, char **argv);

#endif

/* A rank's memory: weights mapped from their files or copied, its own buffers, and the segments that ranks share. */
#ifndef K3_CPU_MEMORY_H
#define K3_CPU_MEMORY_H

#include "image.h"
#include "residency.h"

/* The shared file: K3_SEGMENT_HEADER bytes whose first word is the abort word (rank + 1 of the first that
 * stopped, 0xffffffff from the driver), then one segment a rank: progress lines, gates in two banks, peer
 * buffers. Zero at the start; nobody has to wait for anybody before the first step. */
typedef struct K3Memory {
    void **tensor;       /* by handle */
    K3Expert *experts;   /* by row of the expert section */
    uint64_t *admitted;  /* by row: bit i, the i-th 64th of the scales has been checked */
    char *shared;        /* the shared file */
    uint64_t stride;     /* from one rank's segment to the next */
    uint32_t *abort_word;
    const char **base;   /* by file: where it is mapped, 0 where it is not */
    K3IoFile *mapped;    /* by file: as it was then */
    K3Residency *residency; /* 0: no memory budget, weights are mapped */
    float *logits_file;  /* [rows][vocab], 0 when nobody asked for logits */
    uint64_t logits_rows;
} K3Memory;

/* Map everything; under a budget read what has to be there from the start; if `copies`, all weights but tables of rows
 * (copy.h). `n_lines`: progress lines, one for each thread of the team. Returns 0, or -1 with one line in `why`. `logits_path` may be 0. */
int k3_memory_open(K3Memory *memory, const K3Image *image, const char *shared_path, const char *logits_path, int copies,
                   uint32_t n_lines, char *why, size_t why_bytes);

static inline char *k3_segment(const K3Memory *m, uint32_t rank) {
    return m->shared + K3_SEGMENT_HEADER + (uint64_t)rank * m->stride;
}

static inline uint32_t *k3_progress_line(const K3Memory *m, uint32_t rank, uint32_t worker) {
    return (uint32_t *)(void *)(k3_segment(m, rank) + (uint64_t)worker * K3_LINE);
}

/* Returns 0, or -1 with *fault filled in where a mapped file is not as it was when it was opened: what was computed since
 * may come from another model, half of it. */
int k3_memory_check(const K3Memory *m, const K3Image *image, K3IoFault *fault);

/* Which file's page the address is on that could not be had, and why. Returns 0, or -1 where it is no mapped file's.
 * A signal handler may call it. */
int k3_memory_lost(const K3Memory *m, const K3Image *image, const void *address, K3IoFault *fault);

/* A step is over: give back the pages of the mapped embedding, which would grow by a row a token. */
void k3_memory_end_step(const K3Memory *m, const K3Image *image);

#endif

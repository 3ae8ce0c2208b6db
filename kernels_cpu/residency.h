/* Weights that do not stay: the ring they pass through, and the cache of experts (k3tool/compiler/residency.py has the
 * plan's side). */
#ifndef K3_CPU_RESIDENCY_H
#define K3_CPU_RESIDENCY_H

#include "devices.h"

#include <pthread.h>

#define K3_N_MATRICES 3u /* of an expert: w1, w3, w2 */

/* What a trace of experts holds for each one that a fetch asked for. */
typedef struct K3ExpertEvent {
    uint32_t step, group, expert, is_hit; /* group: row of the layer's first w1, the same in every phase */
} K3ExpertEvent;

typedef struct K3Slot {
    uint32_t key;                 /* row of its w1, K3_NO_INDEX: empty or being filled */
    uint32_t row[K3_N_MATRICES];  /* of the expert section; K3_NO_INDEX: empty */
    uint64_t tick, wanted_by;     /* last use; the fetch that uses it now */
} K3Slot;

typedef struct K3Residency {
    const K3Image *image;
    K3Expert *experts;
    K3IoFile *files;
    K3Devices devices;
    char *ring, *pinned, *slots;
    /* the expert cache: one fetch at a time is under way, by several workers */
    pthread_mutex_t lock;
    K3Slot *slot;
    uint32_t *slot_of; /* by row of the expert section: K3_NO_INDEX, or where that w1's expert lies */
    uint64_t fetch, tick;
    struct { uint32_t expert, slot; } *job; /* what the fetch has to read */
    uint8_t *wanted;                        /* [experts of a layer] */
    uint32_t n_jobs, next_job, fetch_fault, fetch_detail;
    uint32_t n_coming; /* experts of the fetch that have not come */
    int trace_fd, trace_error; /* -1: no trace; errno that ended it */
    uint64_t n_hits, n_misses, n_bytes;
    K3IoFault io_fault; /* the first */
    uint32_t has_io_fault;
} K3Residency;

/* Lay out memory and open the files, if the image has a budget; read what is in place when a step starts, with n_threads
 * threads. *progress is counted up meanwhile. Returns the residency, or 0 with one line in `why` (empty: no budget). */
K3Residency *k3_residency_open(const K3Image *image, K3Expert *experts, uint32_t n_threads, uint32_t *progress, char *why, size_t why_bytes);

/* Where a tensor of place PINNED or RING lies. */
void *k3_residency_tensor(const K3Residency *r, const K3TensorRow *t);

/* Run a slice of a LOAD. Returns 0, or a fault code with the range in r->io_fault. */
uint32_t k3_load(K3Residency *r, const K3Inst *inst, const K3Entry *e, uint32_t *progress, uint32_t *detail);

/* A slice of an EXPERT_FETCH whose routes (top_k ids of every token, then as many weights) are known: give every expert of
 * them a slot; those that are not there are K3_COMING from then on. May be signalled. */
uint32_t k3_fetch_begin(K3Residency *r, const K3Inst *inst, const K3Entry *e, const K3Step *step, const uint32_t *route,
                        uint32_t *detail);

/* Then: bring this slice's share of them, each published when it is whole. */
uint32_t k3_fetch_read(K3Residency *r, const K3Inst *inst, const K3Entry *e, const K3Step *step, uint32_t *progress, uint32_t *detail);

/* Stop tracing experts once a write has failed. */
void k3_residency_trace(K3Residency *r, int fd);

#endif

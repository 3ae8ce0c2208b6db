/* The interpreter: a few pinned threads that step many virtual workgroups through their queues. */
#ifndef K3_CPU_INTERP_H
#define K3_CPU_INTERP_H

#include "bodies.h"
#include "hashes.h"
#include "memory.h"
#include "trace.h"

#include <pthread.h>
#include <sched.h>

/* Faults of the interpreter's own, above those of k3.h. */
#define K3_FAULT_SCALE 32u /* an expert's scale byte is 253 or more (numerics rule 4) */
#define K3_FAULT_IO 33u     /* a weight could not be read: residency.h's io_fault has the range */
#define K3_FAULT_REQUEST 35u /* a request that this image does not allow: steps.h */
#define K3_PENDING 0xffffu  /* no fault: the entry is to be run again when the expert it met has come */

typedef struct __attribute__((aligned(K3_LINE))) K3Counter {
    uint32_t value;
} K3Counter;

typedef struct K3Team K3Team;

/* Where a workgroup's queue stands. Whoever sets `taken` steps it until it clears it again. */
typedef struct __attribute__((aligned(K3_LINE))) K3Queue {
    uint32_t taken;
    uint32_t position;   /* next entry */
    uint32_t waits_done; /* of that entry, already met */
    uint32_t resume;     /* of that entry, called before: K3Ctx */
    const K3Expert *awaits;
} K3Queue;

/* One thread. Its workgroups are index, index + n_threads, ...: the slices of a packet lie on neighbouring
 * workgroups, so this spreads them. When none of its own is ready it runs a slice of another's. Behind the n_threads
 * workers come those that read weights, one for each of the last workgroups: they sleep in the device, so they need no
 * core. Scratch is the thread's, since an op body runs to its end. */
typedef struct __attribute__((aligned(K3_LINE))) K3Worker {
    K3Team *team;
    uint32_t index, idle;
    uint64_t idle_since_ns, idle_progress;
    uint64_t digest;
    K3Ctx ctx;
    pthread_t thread;
} K3Worker;

struct K3Team {
    const K3Image *image;
    const K3Memory *memory;
    const K3Bodies *bodies;
    uint32_t n_threads, n_workers, n_pauses; /* n_workers: with those that read */
    uint64_t deadline_ns;
    cpu_set_t cpus; /* that the process may use */
    K3Counter *counters; /* [2][max_counters] */
    K3Queue *queues;     /* [n_workgroups] */
    K3Worker *workers;
    K3Trace trace; /* set by the owner after the start, or left empty */
    K3Hashes hashes; /* likewise */
    K3Step step; /* this step, and which program runs it */
    uint32_t phase;
    uint32_t quit;
    uint64_t n_step; /* of all steps of this process */
    _Alignas(K3_LINE) uint32_t go; /* steps started */
    _Alignas(K3_LINE) uint32_t running; /* workers still in the step */
    _Alignas(K3_LINE) uint32_t stop; /* a fault was raised */
    K3FaultReport fault;
};

/* Start n_threads - 1 threads; the caller is worker 0. Returns 0, or -1 with one line in `why`. */
int k3_team_start(K3Team *team, const K3Image *image, const K3Memory *memory, const K3Bodies *bodies,
                  uint32_t n_threads, uint64_t deadline_ns, char *why, size_t why_bytes);

/* Run one step of `phase` and audit its counters. Returns 0 and adds to *digest, or the fault's code with
 * the report in team->fault; then the outputs hold NaN. */
uint32_t k3_team_step(K3Team *team, uint32_t phase, const K3Step *step, uint64_t *digest);

void k3_team_stop(K3Team *team);

uint64_t k3_now_ns(void);

/* Digest of what one entry wrote: a sum over words, so that slices add up in any order and any cut. */
uint64_t k3_result_digest(const K3Team *team, const K3Inst *inst, const K3Entry *e);

/* With team->hashes.header set: what one entry wrote, and the start and end of a step. hashes.c */
void k3_hash_entry(const K3Team *team, const K3Entry *e);
void k3_hashes_begin(K3Team *team);
void k3_hashes_end(K3Team *team);

/* Check the ids that the router wrote and, of the experts they name, the scales that an entry reads. Returns a fault code,
 * 0, or K3_PENDING with the expert that is still coming in *detail. */
uint32_t k3_admit_experts(const K3Team *team, const K3Inst *inst, const K3Entry *e, const uint32_t *route, uint32_t top_k, uint32_t *detail);
uint32_t k3_admit_route(const K3Team *team, const K3Inst *inst, const K3Entry *e, uint32_t route_slot, uint32_t *detail);

#endif

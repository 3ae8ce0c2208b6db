/* What the parts of the interpreter share: the loop (interp.c), its threads (team.c) and what they do while nothing is ready
 * (waiting.c). */
#ifndef K3_CPU_TEAM_H
#define K3_CPU_TEAM_H

#include "interp.h"

#define K3_N_YIELDS 200u   /* fruitless passes that give the core away before sleeping */
#define K3_SLEEP_NS 30000  /* long enough to free a core, short against a token */
#define K3_IO_NAP_NS 20000 /* of a worker that reads, the first time; longer the longer nothing comes */
#define K3_MOST_IO_NAPS 10
#define K3_N_SHORT_NAPS 2000u /* before a step: then nobody has asked for one in some 50 ms, as in an engine that waits for requests */
#define K3_LONG_NAP_NS 1000000
#define K3_GUARD_WORDS 16u /* behind the scratch */

/* ---- counters -------------------------------------------------------------------------------------- */

static inline uint32_t *gate(const K3Team *team, uint32_t rank, uint32_t bank, uint32_t id) {
    const uint64_t line = team->n_workers + (uint64_t)bank * team->image->header->max_gates + id;
    return (uint32_t *)(void *)(k3_segment(team->memory, rank) + line * K3_LINE);
}

static inline uint32_t *counter(const K3Team *team, uint32_t bank, uint32_t id) {
    if ((id & K3_SYSTEM) != 0) return gate(team, team->image->header->rank, bank, id & ~K3_SYSTEM);
    return &team->counters[(uint64_t)bank * team->image->header->max_counters + id].value;
}

static inline uint32_t reached(const K3Team *team, uint32_t id) {
    return __atomic_load_n(counter(team, team->step.epoch & 1u, id), __ATOMIC_ACQUIRE);
}

static inline uint32_t position(const K3Queue *queue) { return __atomic_load_n(&queue->position, __ATOMIC_RELAXED); }

/* The expert that a queue's next entry has met and that is still coming, else NULL. */
static inline const K3Expert *awaited(const K3Queue *queue) {
    const K3Expert *expert = __atomic_load_n(&queue->awaits, __ATOMIC_RELAXED);
    return expert != NULL && k3_is_coming(expert) ? expert : NULL;
}

void k3_raise_fault(K3Team *team, const K3FaultReport *fault);

/* A worker's part of a step, until its queues have ended or a fault stops it. */
void k3_run_workgroups(K3Worker *w);

/* Nothing was ready. */
void k3_back_off(K3Worker *w);

#endif

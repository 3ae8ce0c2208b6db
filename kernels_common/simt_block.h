/* What one block of the GPU interpreter (simt_interp.h) keeps, where its counters lie, and how it reports a fault. */
#ifndef K3_SIMT_BLOCK_H
#define K3_SIMT_BLOCK_H

#include "k3.h"
#include "k3_math.h"
#include "launch.h"

#define K3_GUARD_WORDS 16u    /* behind the scratch: a body that writes past its end is caught */
#define K3_SCRATCH_GUARD 0x4b33u

/* In the block's shared memory. */
typedef struct K3Block {
    K3Ctx ctx;
    K3Step step;
    K3Inst inst;
    K3Entry entry;
    uint64_t digest;
    uint32_t domain, window0, window1, next; /* the window; next: of a queue that nobody shares */
    uint32_t at;                             /* the entry, K3_NO_INDEX: none is left */
    uint32_t is_system;                      /* the entry waits for a gate, or signals one */
    uint32_t party;                          /* blocks of the domain that meet at its instruction; 1: each for itself */
    uint32_t is_elected, stopped;
    uint64_t began, since, busy; /* where a launch asks for them */
} K3Block;

/* ---- counters ------------------------------------------------------------------------------------- */

K3_FN uint32_t k3_bank(const K3Block *b) { return b->step.epoch & 1u; }

K3_FN uint32_t *k3_line(char *lines, uint64_t index) { return (uint32_t *)(lines + index * K3_LINE); }

K3_FN uint32_t *k3_gate(const K3Launch *l, uint32_t bank, uint32_t rank, uint32_t id) {
    char *gates = l->gates + ((int64_t)rank - (int64_t)l->rank) * l->peer_stride;
    return k3_line(gates, (uint64_t)bank * l->max_gates + id);
}

K3_FN uint32_t *k3_counter(const K3Launch *l, uint32_t bank, uint32_t id) {
    if ((id & K3_SYSTEM) != 0u) return k3_gate(l, bank, l->rank, id & ~K3_SYSTEM);
    return k3_line(l->counters, (uint64_t)bank * l->max_counters + id);
}

K3_FN uint32_t *k3_cursor(const K3Block *b, const K3Launch *l) {
    return k3_line(l->cursors, (uint64_t)k3_bank(b) * l->max_cursors + (uint64_t)l->segment * l->n_windows + b->domain);
}

enum K3RendezvousWord { K3_ARRIVED = 0, K3_ELECTED = 1, K3_OPEN = 2 };

K3_FN uint32_t *k3_rendezvous(const K3Block *b, const K3Launch *l) {
    const uint64_t at = (uint64_t)b->entry.inst * l->n_domains + b->domain;
    return k3_line(l->rendezvous, (uint64_t)k3_bank(b) * l->max_rendezvous + at);
}

/* ---- faults --------------------------------------------------------------------------------------- */

K3_FN void k3_raise(K3Block *b, const K3Launch *l, const K3FaultReport &fault) {
    b->stopped = 1u;
    if (!k3_swap_zero(&l->control->stop, 1u, K3_DEVICE_SCOPE)) return;
    l->control->fault = fault;
    k3_swap_zero(l->abort_word, l->rank + 1u, K3_SYSTEM_SCOPE);
}

K3_FN void k3_raise_here(K3Block *b, const K3Launch *l, uint32_t code, uint32_t detail) {
    const K3FaultReport fault = {code, l->phase, b->entry.inst, b->inst.op, K3_BLOCK, K3_BLOCK, 0u, 0u, 0u, detail};
    k3_raise(b, l, fault);
}

#endif

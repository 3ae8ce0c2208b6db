/* The inner loop: wait, call, publish. It knows no op; what it must know of one (where the result lies) is a
 * row of the image's op section.
 *
 * Counters of a step live in the bank of its epoch's lowest bit. The entry flagged REARM clears the other
 * bank before it arrives at the fold; every rank has passed the previous fold by then, and nobody can signal
 * into the cleared bank before this arrival. Zeroing between steps instead would race with a faster rank.
 */
#define _GNU_SOURCE
#include "interp.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "team.h"

#define SCRATCH_GUARD 0x4b33u /* word behind the scratch: an op that writes past its end is caught */

uint64_t k3_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- faults ---------------------------------------------------------------------------------------- */

/* The first fault of a rank stays; every rank sees the abort word and stops. */
void k3_raise_fault(K3Team *team, const K3FaultReport *fault) {
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&team->stop, &none, 1u, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    team->fault = *fault;
    none = 0;
    __atomic_compare_exchange_n(team->memory->abort_word, &none, team->image->header->rank + 1u, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static int stopped(const K3Team *team) { return __atomic_load_n(&team->stop, __ATOMIC_ACQUIRE) != 0; }

static void trap(K3Worker *w, uint32_t workgroup, const K3Entry *e, uint32_t code, uint32_t detail) {
    const K3Team *team = w->team;
    const K3Inst *inst = &team->image->program[team->phase].insts[e->inst];
    const K3FaultReport fault = {code, team->phase, e->inst, inst->op, workgroup, w->index, 0, 0, 0, detail};
    k3_raise_fault(w->team, &fault);
}

/* Whatever happens to a step that failed, its numbers must not look like a result. */
static void poison(const K3Team *team) {
    const K3Image *image = team->image;
    for (uint32_t p = 0; p < K3_N_PHASES; p++) {
        if (image->program[p].n_entries == 0) continue;
        const K3PhaseRow *row = &image->program[p].row;
        memset(team->memory->tensor[row->output_handle], 0xff, image->tensors[row->output_handle].bytes);
        memset(team->memory->tensor[row->logits_handle], 0xff, image->tensors[row->logits_handle].bytes);
    }
}

/* ---- counters -------------------------------------------------------------------------------------- */

static void signal_counter(const K3Team *team, uint32_t id) {
    const uint32_t bank = team->step.epoch & 1u;
    if ((id & K3_SYSTEM) == 0) {
        __atomic_fetch_add(counter(team, bank, id), 1u, __ATOMIC_RELEASE);
        return;
    }
    for (uint32_t r = 0; r < team->image->header->n_ranks; r++)
        __atomic_fetch_add(gate(team, r, bank, id & ~K3_SYSTEM), 1u, __ATOMIC_RELEASE);
}

static void rearm(const K3Team *team) {
    const K3ImageHeader *h = team->image->header;
    const uint32_t bank = (team->step.epoch & 1u) ^ 1u;
    memset(&team->counters[(uint64_t)bank * h->max_counters], 0, (uint64_t)h->max_counters * sizeof(K3Counter));
    memset(gate(team, h->rank, bank, 0), 0, (uint64_t)h->max_gates * K3_LINE);
}

/* Every counter must end where its producers add up to: a value above it is a double signal, below it an
 * entry that never ran. Both can hide behind thresholds that happen to be met. */
static void audit(K3Team *team) {
    const K3Program *p = &team->image->program[team->phase];
    for (uint32_t i = 0; i < p->row.n_counters + p->row.n_gates; i++) {
        const uint32_t id = i < p->row.n_counters ? i : (i - p->row.n_counters) | K3_SYSTEM;
        const uint32_t got = reached(team, id);
        if (got == p->expect[i]) continue;
        const K3FaultReport fault = {K3_FAULT_AUDIT, team->phase, K3_NO_INDEX, 0xffff, K3_NO_INDEX, 0, id, got, p->expect[i], 0};
        k3_raise_fault(team, &fault);
        return;
    }
}

/* ---- one entry ------------------------------------------------------------------------------------- */

static int scratch_overrun(const K3Ctx *c) {
    uint32_t different = 0;
    for (uint32_t i = 0; i < K3_GUARD_WORDS; i++) different |= k3_f32_to_bits(c->scratch[c->scratch_floats + i]) ^ SCRATCH_GUARD;
    return different != 0;
}

/* The two ops that move weights: their bodies say what, this does it, or as much of it as comes before their signal. */
static uint32_t bring(K3Worker *w, const K3Inst *inst, const K3Entry *e, uint32_t *detail) {
    const K3Team *team = w->team;
    K3Residency *r = team->memory->residency;
    uint32_t *progress = k3_progress_line(team->memory, team->image->header->rank, w->index);
    if (r == NULL) return K3_FAULT_OPCODE;
    if (inst->op == K3_OP_LOAD) return k3_load(r, inst, e, progress, detail);
    return k3_fetch_begin(r, inst, e, &team->step, (const uint32_t *)w->ctx.scratch, detail);
}

static uint32_t bring_rest(K3Worker *w, const K3Inst *inst, const K3Entry *e, uint32_t *detail) {
    const K3Team *team = w->team;
    uint32_t *progress = k3_progress_line(team->memory, team->image->header->rank, w->index);
    return k3_fetch_read(team->memory->residency, inst, e, &team->step, progress, detail);
}

/* The expert of an instruction that is still coming: the one whose id the check of its route has met. */
static const K3Expert *coming(const K3Team *team, const K3Inst *inst, uint32_t expert) {
    for (uint32_t k = 0; k < K3_N_HANDLES; k++) {
        const K3TensorRow *t = inst->handle[k] == 0xffff ? NULL : &team->image->tensors[inst->handle[k]];
        if (t != NULL && t->place == K3_PLACE_SLOTS && k3_is_coming(&team->memory->experts[t->expert0 + expert]))
            return &team->memory->experts[t->expert0 + expert];
    }
    return NULL; /* it has come meanwhile */
}

/* Returns a fault code; 0 when the entry is done and published; K3_PENDING with ctx.awaits and ctx.resume. */
static uint32_t execute(K3Worker *w, const K3Program *p, const K3Entry *e, uint32_t *detail) {
    const K3Team *team = w->team;
    const K3Inst *inst = &p->insts[e->inst];
    const K3OpFn body = inst->op < K3_N_OPCODES ? team->bodies->op[team->phase][inst->op] : NULL;
    if (body == NULL) return K3_FAULT_OPCODE; /* unknown, reserved or not served in this phase */
    const uint32_t route_slot = team->image->ops[inst->op].route_slot;
    const int own_route = route_slot != K3_NO_SLOT && (route_slot & K3_ROUTE_IN_SCRATCH) != 0;
    if (route_slot != K3_NO_SLOT && !own_route) {
        const uint32_t fault = k3_admit_route(team, inst, e, route_slot, detail);
        if (fault == K3_PENDING) w->ctx.awaits = coming(team, inst, *detail);
        if (fault != K3_FAULT_NONE) return fault;
    }
#ifdef K3_CONTROL_ONE_SERIAL /* only a test defines it: a leaf keeps what it made of another instruction's x */
    w->ctx.serial = 1u;
#else
    w->ctx.serial = (team->n_step << 32) + e->inst + 1u;
#endif
    w->ctx.same_x = NULL;
    body(&w->ctx, inst, e->unit0, e->unit1);
    if (w->ctx.fault != K3_FAULT_NONE) {
        *detail = w->ctx.fault_detail;
        return w->ctx.fault;
    }
    if (w->ctx.awaits != NULL) return K3_PENDING;
    if (scratch_overrun(&w->ctx)) return K3_FAULT_SCRATCH;
    if (inst->op == K3_OP_LOAD || inst->op == K3_OP_EXPERT_FETCH) {
        const uint32_t fault = bring(w, inst, e, detail);
        if (fault != K3_FAULT_NONE) return fault;
    }
    if (own_route) { /* known only now, but nobody has seen the result yet: an expert that is refused stops the run */
        const uint32_t top_k = inst->param[route_slot & ~K3_ROUTE_IN_SCRATCH];
        const uint32_t fault = k3_admit_experts(team, inst, e, (const uint32_t *)w->ctx.scratch, top_k, detail);
        if (fault != K3_FAULT_NONE) return fault;
    }
    if ((e->flags & K3_ENTRY_DIGEST) != 0) w->digest += k3_result_digest(team, inst, e);
    if (team->hashes.header != NULL) k3_hash_entry(team, e); /* before the signal: later its place may hold another result */
    if ((e->flags & K3_ENTRY_REARM) != 0) rearm(team);
#ifdef K3_CONTROL_WHOLE_FETCH /* only a test defines it: nobody sees an expert before all have come */
    if (inst->op == K3_OP_EXPERT_FETCH && bring_rest(w, inst, e, detail) != K3_FAULT_NONE) return K3_FAULT_IO;
#endif
    for (uint32_t i = 0; i < e->n_signals; i++) signal_counter(team, p->signals[e->signal_ofs + i]);
    if (inst->op == K3_OP_EXPERT_FETCH) return bring_rest(w, inst, e, detail);
    return K3_FAULT_NONE;
}

static void trace_event(const K3Worker *w, uint32_t inst, uint32_t workgroup, uint64_t start) {
    const K3Team *team = w->team;
    const K3Event event = {team->step.epoch, inst, workgroup, (uint16_t)w->index, (uint16_t)team->phase, start, k3_now_ns()};
    k3_trace_add(&team->trace, &event);
}

#ifdef K3_CONTROL_STALLS /* only bench long and a test define it: one entry in so many waits first, as on a busy machine */
static void stall(void) {
    static _Thread_local uint32_t x;
    if (x == 0) x = (uint32_t)k3_now_ns() | 1u;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    if (x % (K3_CONTROL_STALLS) != 0) return;
    const struct timespec nap = {0, (long)(x / (K3_CONTROL_STALLS) % 64u == 0 ? 20000000u : x / (K3_CONTROL_STALLS) % 400000u)};
    nanosleep(&nap, NULL);
}
#endif

/* Step one workgroup, which this worker has taken, until it blocks, its queue ends or `most` entries have run.
 * Returns how many ran. */
static uint32_t step_workgroup(K3Worker *w, const K3Program *p, uint32_t workgroup, uint32_t most) {
    K3Team *team = w->team;
    K3Queue *queue = &team->queues[workgroup];
    uint32_t *progress = k3_progress_line(team->memory, team->image->header->rank, w->index);
    uint32_t done = 0;
    while (done < most && position(queue) < p->queue[workgroup + 1]) {
        const K3Entry *e = &p->entries[position(queue)];
        uint32_t *met = &queue->waits_done;
        for (; *met < e->n_waits; (*met)++) {
            const K3Wait *wait = &p->waits[e->wait_ofs + *met];
            if (reached(team, wait->counter) < wait->threshold) return done;
        }
        if (awaited(queue) != NULL) return done;
        uint32_t detail = 0;
#ifdef K3_CONTROL_STALLS
        stall();
#endif
        const uint64_t start = team->trace.line != NULL ? k3_now_ns() : 0;
        w->ctx.resume = queue->resume;
        w->ctx.awaits = NULL;
        const uint32_t fault = execute(w, p, e, &detail);
        const int has_worked = fault != K3_PENDING || w->ctx.resume > queue->resume;
        if (team->trace.line != NULL && w->index < team->n_threads && has_worked) trace_event(w, e->inst, workgroup, start);
        queue->resume = w->ctx.resume;
        __atomic_store_n(&queue->awaits, w->ctx.awaits, __ATOMIC_RELAXED);
        if (fault == K3_PENDING) return done;
        if (fault != K3_FAULT_NONE) {
            trap(w, workgroup, e, fault, detail);
            return done;
        }
        *met = 0;
        queue->resume = 0;
        __atomic_store_n(&queue->position, position(queue) + 1u, __ATOMIC_RELAXED);
        __atomic_fetch_add(progress, 1u, __ATOMIC_RELAXED); /* each at once: a starved worker may need minutes for its queues */
        done++;
    }
    return done;
}

/* The same where nobody else is at it, else 0. *open counts queues that have not ended. */
static uint32_t try_workgroup(K3Worker *w, const K3Program *p, uint32_t workgroup, uint32_t most, uint32_t *open) {
    K3Queue *queue = &w->team->queues[workgroup];
    uint32_t done = 0;
    if (position(queue) == p->queue[workgroup + 1]) return 0;
    if (__atomic_load_n(&queue->taken, __ATOMIC_RELAXED) == 0 && __atomic_exchange_n(&queue->taken, 1u, __ATOMIC_ACQUIRE) == 0) {
        done = step_workgroup(w, p, workgroup, most);
        __atomic_store_n(&queue->taken, 0u, __ATOMIC_RELEASE);
    }
    *open += position(queue) < p->queue[workgroup + 1];
    return done;
}

/* ---- a step ---------------------------------------------------------------------------------------- */

/* Own workgroups as far as they go, with several tokens an entry each in turn, so that slices of one instruction come behind
 * each other and find its x as the last one left it (k3_same_x); only where none of them is ready one slice of another worker's, so that a
 * worker whose core is taken away, or whose slices were the slower ones, does not keep all others waiting. */
void k3_run_workgroups(K3Worker *w) {
    K3Team *team = w->team;
    const K3Program *p = &team->image->program[team->phase];
    const uint32_t n_compute = team->image->header->n_workgroups - (team->n_workers - team->n_threads);
    const int reads = w->index >= team->n_threads;
    const uint32_t first = reads ? n_compute + w->index - team->n_threads : w->index;
    const uint32_t last = reads ? first + 1u : n_compute;
    const uint32_t most = team->step.n_tokens > 1u && !reads ? 1u : UINT32_MAX;
    uint32_t open = 1;
    w->idle = 0;
    w->idle_since_ns = 0;
    while (open > 0 && !stopped(team)) {
        uint32_t done = 0;
        open = 0;
        for (uint32_t g = first; g < last; g += team->n_threads) done += try_workgroup(w, p, g, most, &open);
        for (uint32_t i = 1; i < n_compute && done == 0 && !reads; i++) {
            const uint32_t g = (w->index + i) % n_compute;
            if (g % team->n_threads != w->index) done = try_workgroup(w, p, g, 1, &open);
        }
        if (done > 0) {
            w->idle = 0;
            w->idle_since_ns = 0;
            open = 1; /* it has not looked at all of them */
        } else if (open > 0) {
            k3_back_off(w);
        }
    }
}

uint32_t k3_team_step(K3Team *team, uint32_t phase, const K3Step *step, uint64_t *digest) {
    const K3Program *p = &team->image->program[phase];
    const uint32_t n_workgroups = team->image->header->n_workgroups;
    const uint64_t start = k3_now_ns();
    static uint64_t n_steps; /* of all teams of this process */
    team->step = *step;
    team->phase = phase;
    team->n_step = __atomic_add_fetch(&n_steps, 1u, __ATOMIC_RELAXED);
    for (uint32_t g = 0; g < n_workgroups; g++) team->queues[g] = (K3Queue){.position = p->queue[g]};
    for (uint32_t t = 0; t < team->n_workers; t++) {
        K3Ctx *c = &team->workers[t].ctx;
        team->workers[t].digest = 0;
        c->max_tokens = p->row.max_tokens;
        c->scratch_floats = p->row.scratch_floats;
        c->fault = K3_FAULT_NONE;
        for (uint32_t i = 0; i < K3_GUARD_WORDS; i++) c->scratch[c->scratch_floats + i] = k3_bits_to_f32(SCRATCH_GUARD);
    }
    if (team->hashes.header != NULL) k3_hashes_begin(team);
    __atomic_store_n(&team->running, team->n_workers, __ATOMIC_RELAXED);
    __atomic_fetch_add(&team->go, 1u, __ATOMIC_RELEASE);
    k3_run_workgroups(&team->workers[0]);
    __atomic_fetch_sub(&team->running, 1u, __ATOMIC_ACQ_REL);
    for (uint32_t n = 0; __atomic_load_n(&team->running, __ATOMIC_ACQUIRE) != 0; n++) {
        if (n < team->n_pauses) __builtin_ia32_pause();
        else sched_yield();
    }
    if (team->trace.line != NULL) trace_event(&team->workers[0], K3_NO_INDEX, K3_NO_INDEX, start);
    if (!stopped(team)) audit(team);
    if (stopped(team)) {
        poison(team);
        return team->fault.code;
    }
    if (team->hashes.header != NULL) k3_hashes_end(team);
    for (uint32_t t = 0; t < team->n_threads; t++) *digest += team->workers[t].digest;
    return K3_FAULT_NONE;
}

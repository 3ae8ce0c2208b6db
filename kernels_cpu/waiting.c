/* What a worker does while nothing is ready: give its core away, look for an abort, and name what a step that stands
 * still waits for. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "team.h"

/* Progress of every worker of every rank: a rank that waits for a slow one is not stuck. */
static uint64_t total_progress(const K3Team *team) {
    uint64_t sum = 0;
    for (uint32_t r = 0; r < team->image->header->n_ranks; r++)
        for (uint32_t t = 0; t < team->n_workers; t++)
            sum += __atomic_load_n(k3_progress_line(team->memory, r, t), __ATOMIC_RELAXED);
    return sum;
}

/* The id of an expert in its layer. */
static uint32_t expert_of(const K3Team *team, const K3Expert *expert) {
    const uint32_t row = (uint32_t)(expert - team->memory->experts);
    for (uint32_t i = 0; i < team->image->n_tensors; i++) {
        const K3TensorRow *t = &team->image->tensors[i];
        if (t->place == K3_PLACE_SLOTS && row >= t->expert0 && row - t->expert0 < t->n_experts) return row - t->expert0;
    }
    return row;
}

/* The blocked entry that comes first in the program is where the trouble is; later ones wait for it. Each
 * counter is read once: a second read could show a state in which nothing is wrong. Returns 0 where nothing
 * is blocked now, which is progress. */
static int raise_deadline(K3Worker *w) {
    K3Team *team = w->team;
    const K3Program *p = &team->image->program[team->phase];
    K3FaultReport fault = {K3_FAULT_DEADLINE, team->phase, K3_NO_INDEX, 0xffff, K3_NO_INDEX, w->index, 0, 0, 0, 0};
    for (uint32_t g = 0; g < team->image->header->n_workgroups; g++) {
        const uint32_t at = position(&team->queues[g]);
        if (at >= p->queue[g + 1]) continue;
        const K3Entry *e = &p->entries[at];
        if (e->inst >= fault.inst) continue;
        const K3Expert *expert = awaited(&team->queues[g]);
        if (expert != NULL) {
            fault = (K3FaultReport){K3_FAULT_ABSENT, team->phase, e->inst, p->insts[e->inst].op, g, w->index, 0, 0, 0, expert_of(team, expert)};
            continue;
        }
        for (uint32_t i = 0; i < e->n_waits; i++) {
            const K3Wait *wait = &p->waits[e->wait_ofs + i];
            const uint32_t got = reached(team, wait->counter);
            if (got >= wait->threshold) continue;
            fault.code = K3_FAULT_DEADLINE;
            fault.inst = e->inst;
            fault.opcode = p->insts[e->inst].op;
            fault.workgroup = g;
            fault.counter = wait->counter;
            fault.got = got;
            fault.expected = wait->threshold;
            break;
        }
    }
    if (fault.inst == K3_NO_INDEX) return 0;
    k3_raise_fault(team, &fault);
    return 1;
}

static void check_waiting(K3Worker *w) {
    K3Team *team = w->team;
    const uint32_t abort_word = __atomic_load_n(team->memory->abort_word, __ATOMIC_ACQUIRE);
    if (abort_word != 0 && abort_word != team->image->header->rank + 1u) {
        const K3FaultReport fault = {K3_FAULT_PEER, team->phase, K3_NO_INDEX, 0xffff, K3_NO_INDEX, w->index, 0, 0, 0, abort_word - 1u};
        k3_raise_fault(team, &fault);
        return;
    }
    const uint64_t now = k3_now_ns(), progress = total_progress(team);
    if (w->idle_since_ns == 0 || progress != w->idle_progress) {
        w->idle_since_ns = now;
        w->idle_progress = progress;
    } else if (now - w->idle_since_ns > team->deadline_ns) {
        if (!raise_deadline(w)) w->idle_since_ns = now;
    }
}

/* Nothing was ready. Ranks may outnumber cores, so the core goes to somebody else soon: the tempting endless
 * spin would keep the very rank off the core that this one waits for. */
void k3_back_off(K3Worker *w) {
    w->idle++;
    if (w->index >= w->team->n_threads) { /* one that reads: nobody waits for the time it takes to wake up */
        const struct timespec nap = {0, w->idle < K3_MOST_IO_NAPS ? K3_IO_NAP_NS * (long)w->idle : K3_IO_NAP_NS * K3_MOST_IO_NAPS};
        nanosleep(&nap, NULL);
        check_waiting(w);
    } else if (w->idle <= w->team->n_pauses) {
        __builtin_ia32_pause();
    } else if (w->idle <= w->team->n_pauses + K3_N_YIELDS) {
        sched_yield();
        if (w->idle % 16 == 0) check_waiting(w);
    } else {
        const struct timespec nap = {0, K3_SLEEP_NS};
        nanosleep(&nap, NULL);
        check_waiting(w);
    }
}

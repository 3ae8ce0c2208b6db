/* A team's threads: their start, each pinned to a core where there is one for it, the wait between steps, their end. */
#define _GNU_SOURCE
#include "team.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "ftz.h"
#include "thread.h"

/* Worker t of rank r runs on allowed CPU r * n_threads + t, so that ranks side by side do not share a core
 * while another is free. */
static void prepare_thread(const K3Worker *w) {
    const K3Team *team = w->team;
    const uint32_t index = team->image->header->rank * team->n_threads + w->index;
    uint32_t left = index % (uint32_t)CPU_COUNT(&team->cpus);
    for (int cpu = 0; cpu < CPU_SETSIZE && w->index < team->n_threads; cpu++) {
        if (!CPU_ISSET(cpu, &team->cpus) || left-- != 0) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        break;
    }
#ifndef K3_CONTROL_NO_FTZ /* only a test defines it: the canaries must notice */
    k3_set_ftz();
#endif
    prctl(PR_SET_TIMERSLACK, 1000); /* the default 50 us would triple every nap */
}

static void *worker_main(void *argument) {
    K3Worker *w = argument;
    K3Team *team = w->team;
    uint32_t seen = 0;
    prepare_thread(w);
    for (;;) {
        for (w->idle = 0; __atomic_load_n(&team->go, __ATOMIC_ACQUIRE) == seen;) {
            w->idle++;
            if (w->idle > K3_N_SHORT_NAPS) nanosleep(&(struct timespec){0, K3_LONG_NAP_NS}, NULL);
            else if (w->index >= team->n_threads) nanosleep(&(struct timespec){0, K3_IO_NAP_NS * K3_MOST_IO_NAPS}, NULL);
            else if (w->idle <= team->n_pauses) __builtin_ia32_pause();
            else if (w->idle <= team->n_pauses + K3_N_YIELDS) sched_yield();
            else nanosleep(&(struct timespec){0, K3_SLEEP_NS}, NULL);
        }
        seen++;
        if (team->quit) return NULL;
        k3_run_workgroups(w);
        __atomic_fetch_sub(&team->running, 1u, __ATOMIC_ACQ_REL);
    }
}

static int make_worker(K3Team *team, uint32_t index) {
    K3Worker *w = &team->workers[index];
    const K3Image *image = team->image;
    uint32_t floats = 64;
    for (uint32_t p = 0; p < K3_N_PHASES; p++)
        if (image->program[p].n_entries > 0 && image->program[p].row.scratch_floats > floats) floats = image->program[p].row.scratch_floats;
    const uint64_t bytes = ((uint64_t)floats + K3_GUARD_WORDS) * 4;
    float *scratch = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (scratch == MAP_FAILED) return -1;
    w->team = team;
    w->index = index;
    w->ctx = (K3Ctx){.tensor = team->memory->tensor, .step = &team->step, .scratch = scratch,
                     .rank = image->header->rank, .n_ranks = image->header->n_ranks, .peer_stride = (int64_t)team->memory->stride};
    return 0;
}

int k3_team_start(K3Team *team, const K3Image *image, const K3Memory *memory, const K3Bodies *bodies,
                  uint32_t n_threads, uint64_t deadline_ns, char *why, size_t why_bytes) {
    const K3ImageHeader *h = image->header;
    memset(team, 0, sizeof *team);
    team->image = image;
    team->memory = memory;
    team->bodies = bodies;
    team->n_threads = n_threads;
    team->n_workers = n_threads + h->n_load_queues + h->n_fetch_queues;
    team->deadline_ns = deadline_ns;
    if (sched_getaffinity(0, sizeof team->cpus, &team->cpus) != 0) {
        snprintf(why, why_bytes, "no CPU affinity mask");
        return -1;
    }
    /* With a core for every worker a hand-off is worth spinning for; else whoever is awaited needs this core. */
    team->n_pauses = h->n_ranks * n_threads <= (uint32_t)CPU_COUNT(&team->cpus) ? 300u : 20u;
    team->counters = aligned_alloc(K3_LINE, 2 * ((uint64_t)h->max_counters + 1) * sizeof(K3Counter));
    team->workers = aligned_alloc(K3_LINE, team->n_workers * sizeof(K3Worker));
    team->queues = aligned_alloc(K3_LINE, h->n_workgroups * sizeof *team->queues);
    if (team->counters == NULL || team->workers == NULL || team->queues == NULL) {
        snprintf(why, why_bytes, "out of memory");
        return -1;
    }
    memset(team->counters, 0, 2 * ((uint64_t)h->max_counters + 1) * sizeof(K3Counter));
    memset(team->workers, 0, team->n_workers * sizeof(K3Worker));
    for (uint32_t t = 0; t < team->n_workers; t++) {
        if (make_worker(team, t) != 0) {
            snprintf(why, why_bytes, "no memory for scratch");
            return -1;
        }
        if (t == 0) continue;
        if (k3_thread_start(&team->workers[t].thread, worker_main, &team->workers[t]) != 0) {
            snprintf(why, why_bytes, "thread %u of %u could not be started", t, team->n_workers);
            return -1;
        }
    }
    prepare_thread(&team->workers[0]);
    return 0;
}

void k3_team_stop(K3Team *team) {
    team->quit = 1;
    __atomic_fetch_add(&team->go, 1u, __ATOMIC_RELEASE);
    for (uint32_t t = 1; t < team->n_workers; t++) pthread_join(team->workers[t].thread, NULL);
}

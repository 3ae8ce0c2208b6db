/* The GPU interpreters on the host: kernels_common/simt_interp.h with emulated lanes, behind the interface of
 * kernels_cpu/interp.h, so that the CPU's main, images, segments and records run it on real checkpoints.
 *
 * A block is a set of fibers, a few threads step all blocks, ranks are processes; counters, gates and peer buffers are
 * those of the CPU. K3_HOST_DOMAINS says how many L2 domains there are (1: a queue for each block), K3_HOST_SEGMENTS in
 * how many launches a step is cut, K3_HOST_ORDER which lanes go first. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simt_interp.h"

#define _Alignas alignas
extern "C" {
#include "../../../kernels_cpu/cpu.h"
#include "../../../kernels_cpu/ftz.h"
#include "../../../kernels_cpu/interp.h"
#include "../../../kernels_cpu/measure.h"
}

#ifndef K3_HOST_SEGMENTS
#define K3_HOST_SEGMENTS 1
#endif
#ifndef K3_HOST_ORDER
#define K3_HOST_ORDER K3_HOST_FORWARD
#endif
#ifndef K3_HOST_PHYSICAL_DOMAINS /* negative control: the device has more of them than the stream */
#define K3_HOST_PHYSICAL_DOMAINS K3_HOST_DOMAINS
#endif

static const uint32_t N_DOMAINS = K3_HOST_DOMAINS, N_SEGMENTS = K3_HOST_SEGMENTS;

/* One phase's program as a loader lays it out. */
struct Tables {
    uint32_t *order, *windows, *arrivals;
};

static Tables tables[K3_N_PHASES];
static K3ResultRow *results;
static K3Control control;
static K3Launch launch;
static K3HostBlock *blocks;
static char *lines, *cursors, *rendezvous;
static float *scratch;
static uint32_t max_rendezvous, n_windows;

extern "C" const K3Identity k3_identity;
const K3Identity k3_identity = K3_IDENTITY;

/* ---- what a loader does ---------------------------------------------------------------------------- */

static const K3Program *sorted_program;

static uint32_t domain_of(uint32_t entry) {
    uint32_t w = 0;
    while (entry >= sorted_program->queue[w + 1]) w++;
    return w % N_DOMAINS;
}

static int by_domain(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b, dx = domain_of(x), dy = domain_of(y);
    const K3Entry *e = &sorted_program->entries[x], *f = &sorted_program->entries[y];
    if (dx != dy) return dx < dy ? -1 : 1;
    if (e->inst != f->inst) return e->inst < f->inst ? -1 : 1;
    return e->slice < f->slice ? -1 : e->slice > f->slice;
}

static uint32_t entry_inst(const Tables *t, const K3Program *p, uint32_t at) {
    return p->entries[t->order != 0 ? t->order[at] : at].inst;
}

static void lay_out(Tables *t, const K3Program *p, uint32_t n_workgroups) {
    sorted_program = p;
    uint32_t *bound = (uint32_t *)calloc(n_windows + 1, 4);
    if (N_DOMAINS > 1) {
        t->order = (uint32_t *)calloc(p->n_entries, 4);
        t->arrivals = (uint32_t *)calloc((uint64_t)p->n_insts * N_DOMAINS, 4);
        for (uint32_t i = 0; i < p->n_entries; i++) t->order[i] = i;
        qsort(t->order, p->n_entries, 4, by_domain);
        for (uint32_t i = 0; i < p->n_entries; i++) {
            const uint32_t d = domain_of(i);
            t->arrivals[p->entries[i].inst * N_DOMAINS + d]++;
            for (uint32_t w = d + 1; w <= n_windows; w++) bound[w]++;
        }
    } else {
        memcpy(bound, p->queue, (n_workgroups + 1) * 4);
    }
    /* A segment is a range of instructions. */
    t->windows = (uint32_t *)calloc(N_SEGMENTS * n_windows, 8);
    for (uint32_t s = 0; s < N_SEGMENTS; s++)
        for (uint32_t w = 0; w < n_windows; w++) {
            uint32_t *own = t->windows + 2 * (s * n_windows + w);
            own[0] = s == 0 ? bound[w] : (own - 2 * n_windows)[1];
            own[1] = own[0];
            while (own[1] < bound[w + 1] && entry_inst(t, p, own[1]) < (uint64_t)p->n_insts * (s + 1) / N_SEGMENTS) own[1]++;
        }
    free(bound);
}

/* ---- a launch -------------------------------------------------------------------------------------- */

static void kernel(void *argument) { k3_interpret((K3Block *)k3_host_now->shared, (const K3Launch *)argument); }

struct Stepper {
    pthread_t thread;
    K3Team *team;
    uint32_t index;
};

static void *step_blocks(void *argument) {
    const Stepper *s = (const Stepper *)argument;
    const K3Team *team = s->team;
    uint32_t *progress = k3_progress_line(team->memory, team->image->header->rank, s->index);
    for (uint32_t b = s->index; b < launch.n_blocks; b += team->n_threads) k3_host_start(&blocks[b], kernel, &launch);
    for (uint32_t left = 1; left != 0;) {
        bool moved = false;
        left = 0;
        for (uint32_t b = s->index; b < launch.n_blocks; b += team->n_threads) {
            if (blocks[b].left == 0) continue;
            moved |= k3_host_resume(&blocks[b], (K3HostOrder)K3_HOST_ORDER);
            left += blocks[b].left;
        }
        if (moved) __atomic_fetch_add(progress, 1u, __ATOMIC_RELAXED);
        else sched_yield();
    }
    return NULL;
}

static void run_launch(K3Team *team) {
    Stepper *steppers = (Stepper *)calloc(team->n_threads, sizeof(Stepper));
    for (uint32_t t = 0; t < team->n_threads; t++) {
        steppers[t].team = team;
        steppers[t].index = t;
        if (pthread_create(&steppers[t].thread, NULL, step_blocks, &steppers[t]) != 0) abort();
    }
    for (uint32_t t = 0; t < team->n_threads; t++) pthread_join(steppers[t].thread, NULL);
    free(steppers);
}

/* ---- the interface of kernels_cpu/interp.h --------------------------------------------------------- */

extern "C" uint64_t k3_now_ns(void) { return k3_clock(); }

static char *new_lines(uint64_t n) { return (char *)aligned_alloc(K3_LINE, (n + 1) * K3_LINE); }

extern "C" int k3_team_start(K3Team *team, const K3Image *image, const K3Memory *memory, const K3Bodies *bodies,
                             uint32_t n_threads, uint64_t deadline_ns, char *why, size_t why_bytes) {
    const K3ImageHeader *h = image->header;
    memset(team, 0, sizeof *team);
    if (h->n_load_queues + h->n_fetch_queues != 0) return snprintf(why, why_bytes, "emulated blocks have no memory budget"), -1;
    team->image = image, team->memory = memory, team->bodies = bodies, team->deadline_ns = deadline_ns;
    team->n_threads = team->n_workers = n_threads;
    n_windows = N_DOMAINS > 1 ? N_DOMAINS : h->n_workgroups;
    uint32_t stride = 0;
    for (uint32_t p = 0; p < K3_N_PHASES; p++) {
        const K3Program *program = &image->program[p];
        if (program->n_entries == 0) continue;
        lay_out(&tables[p], program, h->n_workgroups);
        if (program->n_insts * N_DOMAINS > max_rendezvous) max_rendezvous = program->n_insts * N_DOMAINS;
        if (k3_scratch_stride(program->row.scratch_floats) > stride) stride = k3_scratch_stride(program->row.scratch_floats);
    }
    results = (K3ResultRow *)calloc(image->n_tensors + 1, sizeof *results);
    for (uint32_t i = 0; i < image->n_tensors; i++) results[i] = {image->tensors[i].row_elems, image->tensors[i].replicated};
    lines = new_lines(2 * (uint64_t)h->max_counters);
    cursors = new_lines(2 * (uint64_t)N_SEGMENTS * n_windows);
    rendezvous = new_lines(2 * (uint64_t)max_rendezvous);
    memset(lines, 0, 2 * (uint64_t)h->max_counters * K3_LINE);
    memset(cursors, 0, 2 * (uint64_t)N_SEGMENTS * n_windows * K3_LINE);
    memset(rendezvous, 0, 2 * (uint64_t)max_rendezvous * K3_LINE);
    scratch = (float *)aligned_alloc(K3_LINE, (uint64_t)h->n_workgroups * stride * 4);
    blocks = (K3HostBlock *)calloc(h->n_workgroups, sizeof *blocks);
    for (uint32_t b = 0; b < h->n_workgroups; b++) {
        blocks[b].index = b;
        blocks[b].domain = b % K3_HOST_PHYSICAL_DOMAINS;
        blocks[b].shared = aligned_alloc(K3_LINE, (sizeof(K3Block) + K3_LINE) / K3_LINE * K3_LINE);
    }
    k3_set_ftz();
    return 0;
}

static void prepare(const K3Team *team, uint32_t phase) {
    const K3Program *p = &team->image->program[phase];
    const K3ImageHeader *h = team->image->header;
    launch = K3Launch();
    launch.insts = p->insts, launch.entries = p->entries, launch.waits = p->waits;
    launch.order = tables[phase].order, launch.windows = tables[phase].windows, launch.arrivals = tables[phase].arrivals;
    launch.signals = p->signals, launch.expect = p->expect, launch.ops = team->image->ops, launch.results = results;
    launch.tensor = team->memory->tensor, launch.step = &team->step, launch.scratch = scratch;
    launch.counters = lines, launch.cursors = cursors, launch.rendezvous = rendezvous;
    launch.gates = k3_segment(team->memory, h->rank) + (uint64_t)team->n_workers * K3_LINE;
    launch.control = &control, launch.abort_word = team->memory->abort_word;
    launch.deadline_ticks = team->deadline_ns, launch.peer_stride = (int64_t)team->memory->stride;
    launch.output_handle = p->row.output_handle, launch.logits_handle = p->row.logits_handle;
    launch.output_bytes = team->image->tensors[p->row.output_handle].bytes;
    launch.logits_bytes = team->image->tensors[p->row.logits_handle].bytes;
    launch.phase = phase, launch.n_segments = N_SEGMENTS, launch.n_windows = n_windows, launch.n_domains = N_DOMAINS;
    launch.n_blocks = h->n_workgroups, launch.n_counters = p->row.n_counters, launch.n_gates = p->row.n_gates;
    launch.max_counters = h->max_counters, launch.max_gates = h->max_gates;
    launch.max_cursors = N_SEGMENTS * n_windows, launch.max_rendezvous = max_rendezvous;
    launch.rank = h->rank, launch.n_ranks = h->n_ranks, launch.max_tokens = p->row.max_tokens;
    launch.scratch_floats = p->row.scratch_floats;
}

extern "C" uint32_t k3_team_step(K3Team *team, uint32_t phase, const K3Step *step, uint64_t *digest) {
    team->step = *step;
    team->phase = phase;
    control.digest = 0;
    prepare(team, phase);
    for (launch.segment = 0; launch.segment < N_SEGMENTS; launch.segment++) run_launch(team);
    if (control.stop != 0) {
        team->fault = control.fault;
        return control.fault.code;
    }
    *digest += control.digest;
    return K3_FAULT_NONE;
}

extern "C" void k3_team_stop(K3Team *team) { (void)team; }

/* ---- what main asks of a CPU ----------------------------------------------------------------------- */

static uint64_t digest_of(const uint32_t *words, uint64_t n, uint64_t key) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += k3_mix(words[i] ^ k3_mix(key + i));
    return sum;
}

/* Named as the leaves that a driver may ask for; it has no bodies of a CPU. */
extern "C" const K3Bodies k3_bodies_scalar;
const K3Bodies k3_bodies_scalar = {.name = "scalar", .digest = digest_of};
extern "C" const K3Bodies *k3_bodies_here(uint32_t index) { return index == 0 ? &k3_bodies_scalar : NULL; }
extern "C" const K3Bodies *k3_choose_bodies(const char *name) { return strcmp(name, "scalar") == 0 ? &k3_bodies_scalar : NULL; }
extern "C" int k3_measure(int, char **) { return 2; }
extern "C" int k3_measure_io(int, char **) { return 2; }

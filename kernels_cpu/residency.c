/* Where weights lie under a memory budget, and the reads that bring them there.
 *
 * An expert's pointers are 0 unless it has a slot: K3_COMING while that is being filled, then its bytes, whole. A slot that
 * is being filled is nobody else's, and one that the present fetch wants is not taken from it. Which slots a fetch may take
 * at all is the plan's business: it waits for every reader of the fetch before (check D), and a reader ends only when all
 * its experts have come, so no read of that fetch is still under way.
 *
 * A fetch signals when all its experts have slots: readers then use each expert as it arrives.
 */
#define _GNU_SOURCE
#include "residency.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "huge.h"
#include "interp.h"

#define BLOCK ((uint64_t)K3_LOAD_BLOCK_BYTES)

static uint32_t io_fault(K3Residency *r, uint32_t file, K3IoFault *fault, uint32_t *detail) {
    uint32_t none = 0;
    fault->file = file;
    *detail = file;
    if (__atomic_compare_exchange_n(&r->has_io_fault, &none, 1u, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) r->io_fault = *fault;
    return K3_FAULT_IO;
}

/* One read from one of the file's copies. */
static uint32_t read_pages(K3Residency *r, uint32_t file, uint64_t offset, uint64_t bytes, char *pages, uint32_t *detail) {
    K3IoFault fault;
    if (k3_devices_read(&r->devices, &file, offset, bytes, pages, &fault) != 0) return io_fault(r, file, &fault, detail);
    __atomic_fetch_add(&r->n_bytes, bytes, __ATOMIC_RELAXED);
    return K3_FAULT_NONE;
}

/* ---- start ----------------------------------------------------------------------------------------- */

/* With its copies on other devices. */
static int open_file(K3Residency *r, uint32_t file, char *why, size_t why_bytes) {
    for (; file != K3_NO_INDEX && r->files[file].fd < 0; file = r->image->files[file].copy) {
        const K3FileRow *row = &r->image->files[file];
        if (k3_io_open(&r->files[file], r->image->text + row->path_offset, row->bytes, why, why_bytes) != 0) return -1;
    }
    return 0;
}

static int open_files(K3Residency *r, char *why, size_t why_bytes) {
    const K3Image *image = r->image;
    for (uint32_t i = 0; i < image->n_tensors; i++) {
        const K3TensorRow *t = &image->tensors[i];
        if ((t->place == K3_PLACE_PINNED || t->place == K3_PLACE_RING) && open_file(r, t->file, why, why_bytes) != 0) return -1;
        for (uint32_t e = 0; t->place == K3_PLACE_SLOTS && e < t->n_experts; e++) {
            const K3ExpertRow *x = &image->experts[t->expert0 + e];
            if (open_file(r, x->packed_file, why, why_bytes) != 0 || open_file(r, x->scale_file, why, why_bytes) != 0) return -1;
        }
    }
    return 0;
}

static int allocate(K3Residency *r) {
    const K3ImageHeader *h = r->image->header;
    uint32_t most = 1;
    for (uint32_t i = 0; i < r->image->n_tensors; i++)
        if (r->image->tensors[i].place == K3_PLACE_SLOTS && r->image->tensors[i].n_experts > most) most = r->image->tensors[i].n_experts;
    r->files = malloc((r->image->n_files + 1u) * sizeof *r->files);
    r->slot = calloc(h->n_expert_slots + 1u, sizeof *r->slot);
    r->slot_of = malloc((r->image->n_experts + 1u) * sizeof *r->slot_of);
    r->job = malloc((h->n_expert_slots + 1u) * sizeof *r->job);
    r->wanted = malloc(most);
    if (r->files == NULL || r->slot == NULL || r->slot_of == NULL || r->job == NULL || r->wanted == NULL) return -1;
    for (uint32_t i = 0; i < r->image->n_files; i++) r->files[i].fd = -1;
    for (uint32_t i = 0; i < r->image->n_experts; i++) r->slot_of[i] = K3_NO_INDEX;
    for (uint32_t i = 0; i < h->n_expert_slots; i++)
        r->slot[i] = (K3Slot){.key = K3_NO_INDEX, .row = {K3_NO_INDEX, K3_NO_INDEX, K3_NO_INDEX}};
    r->ring = k3_huge_alloc(h->ring_bytes);
    r->pinned = k3_huge_alloc(h->pinned_bytes);
    r->slots = k3_huge_alloc(h->n_expert_slots * h->slot_bytes);
    return r->ring == NULL || r->pinned == NULL || r->slots == NULL ? -1 : 0;
}

/* ---- what is there from the start ------------------------------------------------------------------ */

typedef struct Starter { /* threads that share one list of tensors */
    K3Residency *r;
    uint32_t next, *progress;
    uint32_t fault;
} Starter;

static char *pages_of(const K3Residency *r, const K3TensorRow *t) {
    return (t->place == K3_PLACE_RING ? r->ring : r->pinned) + t->home;
}

static int is_there_at_start(const K3TensorRow *t) {
    return t->place == K3_PLACE_PINNED || (t->place == K3_PLACE_RING && t->is_primed != 0);
}

/* Blocks [b0, b1) of the pages that enclose a tensor. */
static uint32_t read_blocks(K3Residency *r, const K3TensorRow *t, uint64_t b0, uint64_t b1, uint32_t *progress, uint32_t *detail) {
    const uint64_t first = k3_io_down(t->offset), end = t->offset + t->bytes;
    for (uint64_t b = b0; b < b1 && first + b * BLOCK < end; b++) {
        const uint64_t at = first + b * BLOCK, from = at > t->offset ? at : t->offset;
        const uint64_t to = at + BLOCK < end ? at + BLOCK : end;
        const uint32_t fault = read_pages(r, t->file, from, to - from, pages_of(r, t) + b * BLOCK, detail);
        if (fault != K3_FAULT_NONE) return fault;
        __atomic_fetch_add(progress, 1u, __ATOMIC_RELAXED);
    }
    return K3_FAULT_NONE;
}

static void *starter_main(void *argument) {
    Starter *s = argument;
    const K3Image *image = s->r->image;
    uint32_t i, detail;
    while ((i = __atomic_fetch_add(&s->next, 1u, __ATOMIC_RELAXED)) < image->n_tensors && __atomic_load_n(&s->fault, __ATOMIC_RELAXED) == 0)
        if (is_there_at_start(&image->tensors[i])) {
            const uint32_t fault = read_blocks(s->r, &image->tensors[i], 0, UINT64_MAX, s->progress, &detail);
            if (fault != K3_FAULT_NONE) __atomic_store_n(&s->fault, fault, __ATOMIC_RELAXED);
        }
    return NULL;
}

static int read_start(K3Residency *r, uint32_t n_threads, uint32_t *progress, char *why, size_t why_bytes) {
    Starter s = {.r = r, .progress = progress};
    pthread_t thread[64];
    uint32_t n = 0;
    while (n + 1u < n_threads && n < 64u && pthread_create(&thread[n], NULL, starter_main, &s) == 0) n++;
    starter_main(&s);
    for (uint32_t i = 0; i < n; i++) pthread_join(thread[i], NULL);
    if (s.fault == K3_FAULT_NONE) return 0;
    k3_io_words(&r->io_fault, r->image->text + r->image->files[r->io_fault.file].path_offset, why, why_bytes);
    return -1;
}

void *k3_residency_tensor(const K3Residency *r, const K3TensorRow *t) { return pages_of(r, t) + t->offset % K3_IO_PAGE; }

K3Residency *k3_residency_open(const K3Image *image, K3Expert *experts, uint32_t n_threads, uint32_t *progress, char *why, size_t why_bytes) {
    why[0] = 0;
    if (image->header->n_load_queues == 0) return NULL;
    K3Residency *r = calloc(1, sizeof *r);
    if (r == NULL) return NULL;
    r->image = image;
    r->experts = experts;
    r->trace_fd = -1;
    pthread_mutex_init(&r->lock, NULL);
    if (allocate(r) != 0) {
        snprintf(why, why_bytes, "memory for weights: %s", strerror(errno));
        return NULL;
    }
    k3_devices_begin(&r->devices, image, r->files);
    if (open_files(r, why, why_bytes) != 0 || read_start(r, n_threads, progress, why, why_bytes) != 0) return NULL;
    r->n_bytes = 0;
    for (uint32_t i = 0; i < K3_MOST_DEVICES; i++) r->devices.device[i].n_bytes = 0;
    return r;
}

/* ---- LOAD ------------------------------------------------------------------------------------------ */

uint32_t k3_load(K3Residency *r, const K3Inst *inst, const K3Entry *e, uint32_t *progress, uint32_t *detail) {
    const K3TensorRow *t = &r->image->tensors[inst->handle[K3_LOAD_W]];
    if (t->place != K3_PLACE_RING) return K3_FAULT_RANGE;
#ifdef K3_CONTROL_NO_LOAD /* only a test defines it: what is not loaded must change the result */
    return K3_FAULT_NONE;
#endif
    return read_blocks(r, t, e->unit0, e->unit1, progress, detail);
}

/* ---- EXPERT_FETCH ---------------------------------------------------------------------------------- */

typedef struct Extent {
    uint32_t file;
    uint64_t offset, bytes;
    const uint8_t **pointer;
} Extent;

static void sort_extents(Extent *x, uint32_t n) {
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t k = i; k > 0 && (x[k - 1].file > x[k].file || (x[k - 1].file == x[k].file && x[k - 1].offset > x[k].offset)); k--) {
            const Extent other = x[k];
            x[k] = x[k - 1];
            x[k - 1] = other;
        }
}

/* Read one expert into its slot: neighbours in a file in one read, so a shard's expert is one read altogether. */
static uint32_t read_expert(K3Residency *r, uint32_t slot, const K3TensorRow *const *t, K3Expert *made, uint32_t *detail) {
    const uint64_t room = r->image->header->slot_bytes;
    char *base = r->slots + (uint64_t)slot * room;
    Extent x[2 * K3_N_MATRICES];
    uint64_t at = 0;
    for (uint32_t m = 0; m < K3_N_MATRICES; m++) {
        const K3ExpertRow *row = &r->image->experts[r->slot[slot].row[m]];
        x[2 * m] = (Extent){row->packed_file, row->packed_offset, t[m]->packed_bytes, &made[m].packed};
        x[2 * m + 1] = (Extent){row->scale_file, row->scale_offset, t[m]->scale_bytes, &made[m].scale};
    }
    sort_extents(x, 2 * K3_N_MATRICES);
    for (uint32_t i = 0, n; i < 2 * K3_N_MATRICES; i += n) {
        const uint64_t first = k3_io_down(x[i].offset);
        uint64_t end = x[i].offset + x[i].bytes;
        for (n = 1; i + n < 2 * K3_N_MATRICES && x[i + n].file == x[i].file && x[i + n].offset <= k3_io_up(end); n++)
            end = x[i + n].offset + x[i + n].bytes;
        if (at + k3_io_up(end - first) > room) {
            *detail = slot;
            return K3_FAULT_RANGE;
        }
        const uint32_t fault = read_pages(r, x[i].file, x[i].offset, end - x[i].offset, base + at, detail);
        if (fault != K3_FAULT_NONE) return fault;
        for (uint32_t k = i; k < i + n; k++) *x[k].pointer = (const uint8_t *)base + at + (x[k].offset - first);
        at += k3_io_up(end - first);
    }
    return K3_FAULT_NONE;
}

static void set_state(K3Expert *expert, uintptr_t state) {
    expert->scale = NULL;
    __atomic_store_n(&expert->packed, (const uint8_t *)state, __ATOMIC_RELEASE);
}

static void evict(K3Residency *r, uint32_t slot) {
    K3Slot *s = &r->slot[slot];
    for (uint32_t m = 0; m < K3_N_MATRICES; m++)
        if (s->row[m] != K3_NO_INDEX) set_state(&r->experts[s->row[m]], 0);
    if (s->key != K3_NO_INDEX) r->slot_of[s->key] = K3_NO_INDEX;
    s->key = K3_NO_INDEX;
}

/* The slot unused for longest, K3_NO_INDEX where this fetch wants them all. */
static uint32_t oldest_slot(const K3Residency *r) {
    uint32_t best = K3_NO_INDEX;
    for (uint32_t i = 0; i < r->image->header->n_expert_slots; i++)
        if (r->slot[i].wanted_by != r->fetch && (best == K3_NO_INDEX || r->slot[i].tick < r->slot[best].tick)) best = i;
    return best;
}

static void trace_experts(K3Residency *r, const K3ExpertEvent *events, uint32_t n) {
    const size_t bytes = n * sizeof *events;
    if (r->trace_fd < 0 || n == 0) return;
    const ssize_t done = write(r->trace_fd, events, bytes);
    if (done == (ssize_t)bytes) return;
    r->trace_error = done < 0 ? errno : ENOSPC;
    close(r->trace_fd);
    r->trace_fd = -1;
}

void k3_residency_trace(K3Residency *r, int fd) { r->trace_fd = fd; }

/* Decide what the fetch reads and where to. The lock is held. */
static void begin_fetch(K3Residency *r, const K3TensorRow *const *t, const K3Step *step, const uint32_t *route, uint32_t top_k) {
    K3ExpertEvent event[64];
    uint32_t n_events = 0;
    r->n_jobs = r->next_job = 0;
    r->fetch_fault = K3_FAULT_NONE;
    if (__atomic_load_n(&r->n_coming, __ATOMIC_ACQUIRE) != 0) { /* a plan whose fetch has no readers to wait for */
        r->fetch_fault = K3_FAULT_RANGE;
        r->fetch_detail = r->n_coming;
        return;
    }
    memset(r->wanted, 0, t[0]->n_experts);
    for (uint32_t n = 0; n < step->n_tokens * top_k; n++) {
        const uint32_t expert = route[(uint64_t)(n / top_k) * 2 * top_k + n % top_k];
        if (expert >= t[0]->n_experts) {
            r->fetch_fault = K3_FAULT_RANGE;
            r->fetch_detail = expert;
            return;
        }
        r->wanted[expert] = 1;
        const uint32_t slot = r->slot_of[t[0]->expert0 + expert];
        if (slot != K3_NO_INDEX) r->slot[slot].wanted_by = r->fetch;
    }
    for (uint32_t expert = 0; expert < t[0]->n_experts; expert++) {
        if (r->wanted[expert] == 0) continue;
        uint32_t slot = r->slot_of[t[0]->expert0 + expert];
        const uint32_t is_hit = slot != K3_NO_INDEX;
        if (!is_hit) {
            slot = oldest_slot(r);
            if (slot == K3_NO_INDEX) {
                r->fetch_fault = K3_FAULT_RANGE;
                r->fetch_detail = expert;
                return;
            }
            evict(r, slot);
            for (uint32_t m = 0; m < K3_N_MATRICES; m++) {
                r->slot[slot].row[m] = t[m]->expert0 + expert;
                set_state(&r->experts[r->slot[slot].row[m]], K3_COMING);
            }
            r->job[r->n_jobs].expert = expert;
            r->job[r->n_jobs++].slot = slot;
        }
        r->slot[slot].tick = ++r->tick;
        r->slot[slot].wanted_by = r->fetch;
        *(is_hit ? &r->n_hits : &r->n_misses) += 1;
        event[n_events++] = (K3ExpertEvent){step->epoch, t[0]->expert0, expert, is_hit};
        if (n_events == 64u) {
            trace_experts(r, event, n_events);
            n_events = 0;
        }
    }
    trace_experts(r, event, n_events);
    __atomic_store_n(&r->n_coming, r->n_jobs, __ATOMIC_RELEASE);
}

static uint64_t serial_of(const K3Entry *e, const K3Step *step) { return ((uint64_t)step->epoch << 32 | e->inst) + 1u; }

static uint32_t matrices_of(const K3Residency *r, const K3Inst *inst, const K3TensorRow **t) {
    static const uint32_t OPERAND[K3_N_MATRICES] = {K3_EXPERT_FETCH_W1, K3_EXPERT_FETCH_W3, K3_EXPERT_FETCH_W2};
    for (uint32_t m = 0; m < K3_N_MATRICES; m++) {
        t[m] = &r->image->tensors[inst->handle[OPERAND[m]]];
        if (t[m]->place != K3_PLACE_SLOTS || t[m]->n_experts != t[0]->n_experts) return K3_FAULT_RANGE;
    }
    return K3_FAULT_NONE;
}

uint32_t k3_fetch_begin(K3Residency *r, const K3Inst *inst, const K3Entry *e, const K3Step *step, const uint32_t *route,
                        uint32_t *detail) {
    const K3TensorRow *t[K3_N_MATRICES];
    if (matrices_of(r, inst, t) != K3_FAULT_NONE) return K3_FAULT_RANGE;
    pthread_mutex_lock(&r->lock);
    if (r->fetch != serial_of(e, step)) {
        r->fetch = serial_of(e, step);
        begin_fetch(r, t, step, route, inst->param[K3_EXPERT_FETCH_TOP_K]);
    }
    const uint32_t fault = r->fetch_fault;
    *detail = r->fetch_detail;
    pthread_mutex_unlock(&r->lock);
    return fault;
}

/* The next expert to read, in ascending order, which is the order of use; 0 when there is none, or when the next fetch has
 * begun: its readers were this one's to wait for, so all of this one's experts have come. */
static int take_job(K3Residency *r, uint64_t serial, uint32_t *expert, uint32_t *slot) {
    pthread_mutex_lock(&r->lock);
    const int is_mine = r->fetch == serial && r->next_job < r->n_jobs;
    if (is_mine) {
        *expert = r->job[r->next_job].expert;
        *slot = r->job[r->next_job++].slot;
    }
    pthread_mutex_unlock(&r->lock);
    return is_mine;
}

/* An expert is published by the pointer that its readers look at first: all else of it is stored before. */
static void publish(K3Residency *r, uint32_t slot, uint32_t key, const K3Expert *made) {
    r->slot[slot].key = key;
    r->slot_of[key] = slot;
    __atomic_fetch_sub(&r->n_coming, 1u, __ATOMIC_RELEASE);
    for (uint32_t m = K3_N_MATRICES; m-- > 0;) {
        K3Expert *expert = &r->experts[r->slot[slot].row[m]];
        expert->scale = made[m].scale;
        __atomic_store_n(&expert->packed, made[m].packed, __ATOMIC_RELEASE);
    }
}

uint32_t k3_fetch_read(K3Residency *r, const K3Inst *inst, const K3Entry *e, const K3Step *step, uint32_t *progress, uint32_t *detail) {
    const uint64_t serial = serial_of(e, step);
    const K3TensorRow *t[K3_N_MATRICES];
    uint32_t expert, slot;
    if (matrices_of(r, inst, t) != K3_FAULT_NONE) return K3_FAULT_RANGE;
    while (take_job(r, serial, &expert, &slot)) {
        K3Expert made[K3_N_MATRICES];
#ifdef K3_CONTROL_NO_FETCH /* only a test defines it: an expert that did not come must stop the run */
        evict(r, slot);
        continue;
#endif
#ifdef K3_CONTROL_LATE_MS /* only a test defines it: by so much the last expert of a fetch comes late */
        if (slot == r->job[r->n_jobs - 1u].slot) nanosleep(&(struct timespec){(K3_CONTROL_LATE_MS) / 1000, (K3_CONTROL_LATE_MS) % 1000 * 1000000l}, NULL);
#endif
        const uint32_t fault = read_expert(r, slot, t, made, detail);
        if (fault != K3_FAULT_NONE) return fault;
        publish(r, slot, t[0]->expert0 + expert, made);
        __atomic_fetch_add(progress, 1u, __ATOMIC_RELAXED);
    }
    return K3_FAULT_NONE;
}

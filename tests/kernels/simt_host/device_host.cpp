/* A GPU's driver on the host, as a library: launches of kernels_common/simt_interp.h on emulated blocks, several at once.
 *
 * Memory is the process's own, so an address is a pointer and peers reach each other. A stream has one thread, which
 * steps all blocks of its launch; blocks keep their stacks from launch to launch. k3tool/runtime/gpu_runtime.py says what a
 * device does, tests/kernels/emulated_device.py calls this. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "simt_interp.h"

#ifndef K3_HOST_ORDER
#define K3_HOST_ORDER K3_HOST_FORWARD
#endif

#define __global__
extern "C" const K3Identity k3_identity;
const K3Identity k3_identity = K3_IDENTITY;
K3_CANARY_KERNEL(k3_canary)
K3_BARRIER_KERNEL(k3_barrier)

enum { N_STREAMS = 8 };
struct Stream {
    pthread_t thread;
    K3HostBlock *blocks;
    uint32_t n_made, n_blocks;
    void (*kernel)(void *);
    const void *argument[2];
    bool is_started;
    int is_done;
};
static Stream streams[N_STREAMS];
static K3HostOrder order = (K3HostOrder)K3_HOST_ORDER;

static void interpret(void *s) { k3_interpret((K3Block *)k3_host_now->shared, (const K3Launch *)((Stream *)s)->argument[0]); }

static void run_canary(void *s) {
    const Stream *stream = (const Stream *)s;
    k3_canary((const float *)stream->argument[0], (float *)stream->argument[1]);
}

static void run_barrier(void *s) {
    const Stream *stream = (const Stream *)s;
    k3_barrier((const uint32_t *)stream->argument[0], (uint32_t *)stream->argument[1]);
}

static void *step_blocks(void *argument) {
    Stream *s = (Stream *)argument;
    for (uint32_t b = 0; b < s->n_blocks; b++) k3_host_start(&s->blocks[b], s->kernel, s);
    for (uint32_t left = 1; left != 0;) {
        bool moved = false;
        left = 0;
        for (uint32_t b = 0; b < s->n_blocks; b++) {
            if (s->blocks[b].left == 0) continue;
            moved |= k3_host_resume(&s->blocks[b], order);
            left += s->blocks[b].left;
        }
        if (!moved) sched_yield();
    }
    __atomic_store_n(&s->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* More blocks, where a launch has more than any before. */
static int grow(Stream *s, uint32_t n_blocks, uint32_t n_domains) {
    if (n_blocks <= s->n_made) return 0;
    K3HostBlock *blocks = (K3HostBlock *)calloc(n_blocks, sizeof *blocks);
    if (blocks == NULL) return -1;
    for (uint32_t b = 0; b < n_blocks; b++) {
        if (b < s->n_made) blocks[b] = s->blocks[b];
        else blocks[b].shared = aligned_alloc(K3_LINE, (sizeof(K3Block) + K3_LINE) / K3_LINE * K3_LINE);
        blocks[b].index = b;
        blocks[b].domain = b % n_domains;
    }
    free(s->blocks);
    s->blocks = blocks;
    s->n_made = n_blocks;
    return 0;
}

static void settle(Stream *s) {
    if (s->is_started) pthread_join(s->thread, NULL);
    s->is_started = false;
}

/* kernel: 0 the interpreter, 1 the canary, 2 the barrier. Returns 0, or -1 where it cannot be started. */
extern "C" int k3_device_launch(uint32_t stream, uint32_t kernel, uint32_t n_blocks, uint32_t n_domains, const void *first, const void *second) {
    if (stream >= N_STREAMS) return -1;
    Stream *s = &streams[stream];
    settle(s);
    if (grow(s, n_blocks, n_domains) != 0) return -1;
    s->kernel = kernel == 0 ? interpret : kernel == 1 ? run_canary : run_barrier;
    s->argument[0] = first, s->argument[1] = second;
    s->n_blocks = n_blocks, s->is_done = 0;
    s->is_started = pthread_create(&s->thread, NULL, step_blocks, s) == 0;
    return s->is_started ? 0 : -1;
}

#ifdef K3_HOST_SPARED
/* From now on no lane waits at one barrier (line 0: all wait at all), and lanes go first in this order. */
extern "C" void k3_device_spare(const char *file, uint32_t line, uint32_t which) {
    snprintf(k3_host_spared_file, sizeof k3_host_spared_file, "%s", file);
    k3_host_spared_line = line;
    order = (K3HostOrder)which;
}
#endif

extern "C" int k3_device_is_idle(void) {
    for (uint32_t i = 0; i < N_STREAMS; i++) {
        if (streams[i].is_started && __atomic_load_n(&streams[i].is_done, __ATOMIC_ACQUIRE) == 0) return 0;
        settle(&streams[i]);
    }
    return 1;
}

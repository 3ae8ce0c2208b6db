/* Blocks of lanes as fibers on x86-64 threads. A lane runs until it meets a barrier, an exchange or a pause; a block stays
 * with one thread, and a thread may have several, of which one that only pauses gives way to the next.
 *
 * What a GPU does not promise must not matter, so the caller chooses who goes first. K3_HOST_FORWARD and
 * K3_HOST_REVERSE let one team of 16 run until it can go no further without another, then the next: a team
 * that overwrites what a later one still has to read, or reads what a later one has to write, gets wrong
 * bits in one of the two. K3_HOST_STRIDED lets all lanes take a turn.
 *
 * Fails (k3_host_fail) where a GPU would hang or read garbage: a barrier that not all lanes reach, an exchange
 * that not all 16 lanes of a team take part in, a misaligned vector load. */
#ifndef K3_HOST_LANES_H
#define K3_HOST_LANES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <xmmintrin.h>

enum { K3_HOST_STACK = 256 * 1024 };
typedef enum { K3_HOST_FORWARD = 0, K3_HOST_REVERSE = 1, K3_HOST_STRIDED = 2 } K3HostOrder;

struct K3HostBlock {
    void *scheduler, *lane[K3_HOST_LANES];
    char *stacks;
    bool done[K3_HOST_LANES];
    uint32_t exchanges[K3_HOST_LANES]; /* how many this lane has entered */
    uint32_t parked[K3_HOST_LANES];    /* the generation whose end this lane waits for, and 1; 0: it does not */
    float value[K3_HOST_LANES][2];
    uint32_t arrived, generation, left; /* left: lanes that have not ended */
    bool progress, paused;              /* paused: some lane waits for another block */
    uint32_t index, domain;
    void *shared; /* the block's shared memory */
    void *own;    /* and what a body has of it, from its first use on */
    void (*body)(void *);
    void *argument;
};

/* The block that this thread steps, and its lane. */
#define K3_HOST_OWN static thread_local __attribute__((tls_model("initial-exec")))
K3_HOST_OWN K3HostBlock *k3_host_now;
K3_HOST_OWN uint32_t k3_host_lane;

static void k3_host_fail(const char *what) {
    fprintf(stderr, "lane %u: %s\n", k3_host_lane, what);
    abort();
}

/* Save the callee-saved registers, store the stack pointer in *from, continue at `to`. */
extern "C" void k3_host_switch(void **from, void *to);
__asm__(
    ".text\n.globl k3_host_switch\n.hidden k3_host_switch\nk3_host_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void __attribute__((noinline)) k3_host_yield() {
    k3_host_switch(&k3_host_now->lane[k3_host_lane], k3_host_now->scheduler);
}

/* What a lane does between two looks at a counter: others may run, and if all only wait, other blocks. */
static void __attribute__((noinline)) k3_host_pause() {
    k3_host_now->paused = true;
    k3_host_yield();
}

static void __attribute__((noinline)) k3_host_barrier() {
    const uint32_t mine = k3_host_now->generation;
    k3_host_now->progress = true;
    if (++k3_host_now->arrived == K3_HOST_LANES) {
        k3_host_now->arrived = 0;
        k3_host_now->generation++;
    }
    k3_host_now->parked[k3_host_lane] = mine + 1u;
    do k3_host_yield(); /* who came last goes on no sooner than the others */
    while (k3_host_now->generation == mine);
    k3_host_now->parked[k3_host_lane] = 0u;
    k3_host_now->progress = true;
}

/* The value that lane `from` (0..15) of this team passes to the same exchange. Two places in turn: nobody
 * can be two exchanges ahead of a lane that has not read yet. */
static float __attribute__((noinline)) k3_host_exchange(float v, uint32_t from) {
    const uint32_t me = k3_host_lane, team = me & ~15u, n = ++k3_host_now->exchanges[me];
    k3_host_now->value[me][n & 1u] = v;
    k3_host_now->progress = true;
    for (uint32_t t = 0; t < 16u; t++)
        while (k3_host_now->exchanges[team + t] < n) k3_host_yield();
    k3_host_now->progress = true;
    return k3_host_now->value[team + from][n & 1u];
}

/* The block's one object of K3_SHARED. */
static void *k3_host_shared(size_t n_bytes) {
    const size_t lines = (n_bytes + 63u) / 64u * 64u;
    if (!k3_host_now->own) k3_host_now->own = aligned_alloc(64u, lines);
    if (!k3_host_now->own) k3_host_fail("no memory for a block's shared memory");
    return k3_host_now->own;
}

static void k3_host_entry() {
    k3_host_now->body(k3_host_now->argument);
    k3_host_now->done[k3_host_lane] = true;
    k3_host_now->progress = true;
    k3_host_yield();
    k3_host_fail("resumed after its end");
}

static void k3_host_start_lane(uint32_t lane) {
    void **top = (void **)(k3_host_now->stacks + (size_t)(lane + 1u) * K3_HOST_STACK);
    top -= 1; /* entry starts as if called: the stack pointer is 8 past a multiple of 16 */
    *--top = (void *)k3_host_entry;
    top -= 6; /* the six registers that the switch pops */
    k3_host_now->lane[lane] = top;
    k3_host_now->done[lane] = false;
    k3_host_now->exchanges[lane] = 0;
    k3_host_now->parked[lane] = 0;
}

/* Give every unfinished lane of [first, first + n) a turn, from `start` by `step`; whether any got further. */
static bool k3_host_turn(uint32_t first, uint32_t n, uint32_t start, uint32_t step) {
    K3HostBlock *block = k3_host_now;
    block->progress = false;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t lane = first + (start + i * step) % n;
        if (block->done[lane] || block->parked[lane] == block->generation + 1u) continue;
        k3_host_lane = lane;
        k3_host_switch(&block->scheduler, block->lane[lane]);
        block->left -= block->done[lane];
    }
    return block->progress;
}

/* All lanes at the start of `body`. */
static void k3_host_start(K3HostBlock *block, void (*body)(void *), void *argument) {
    const uint32_t n = K3_HOST_LANES;
    if (!block->stacks)
        block->stacks = (char *)mmap(0, (size_t)n * K3_HOST_STACK, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block->stacks == MAP_FAILED) k3_host_fail("no memory for the stacks");
    k3_host_now = block;
    block->body = body, block->argument = argument, block->arrived = 0, block->left = n;
    for (uint32_t lane = 0; lane < n; lane++) k3_host_start_lane(lane);
}

/* Step a block until it ends, or until all its lanes wait for other blocks; with rule 1's rounding mode. Returns whether
 * any lane got further. */
static bool k3_host_resume(K3HostBlock *block, K3HostOrder order) {
    const uint32_t n = K3_HOST_LANES, before = _mm_getcsr();
    bool ever = false;
    k3_host_now = block;
    _mm_setcsr(0x9fc0u);
    while (block->left) {
        const uint32_t had = block->left, generation = block->generation;
        bool moved = false;
        block->paused = false;
        if (order == K3_HOST_STRIDED)
            moved = k3_host_turn(0u, n, 0u, 37u);
        else
            for (uint32_t i = 0; i < n; i += 16u) {
                const uint32_t team = order == K3_HOST_FORWARD ? i : n - 16u - i;
                const uint32_t back = order == K3_HOST_FORWARD ? 0u : 15u; /* lane 0 last: it writes for others */
                while (generation == block->generation && k3_host_turn(team, 16u, back, back ? 15u : 1u)) moved = true;
                if (generation != block->generation) break; /* a barrier opened: from the first team again */
            }
        if (moved || block->left != had) ever = true;
        else if (block->paused) break;
        else k3_host_fail("waits for lanes that will never come");
    }
    _mm_setcsr(before);
    return ever;
}

/* Run `body` on all lanes of a block that needs no other. */
static void k3_host_run(K3HostOrder order, void (*body)(void *), void *argument) {
    static K3HostBlock own;
    k3_host_start(&own, body, argument);
    k3_host_resume(&own, order);
    if (own.left) k3_host_fail("waits for another block, and there is none");
}

#endif

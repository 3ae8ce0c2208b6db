/* A block of lanes as fibers on one x86-64 thread. A lane runs until it meets a barrier or an exchange.
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
    float value[K3_HOST_LANES][2];
    uint32_t arrived, generation;
    bool progress;
    void (*body)(void *);
    void *argument;
};

static K3HostBlock k3_host;
static uint32_t k3_host_lane;

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
    k3_host_switch(&k3_host.lane[k3_host_lane], k3_host.scheduler);
}

static void __attribute__((noinline)) k3_host_barrier() {
    const uint32_t mine = k3_host.generation;
    k3_host.progress = true;
    if (++k3_host.arrived == K3_HOST_LANES) {
        k3_host.arrived = 0;
        k3_host.generation++;
    }
    do k3_host_yield(); /* who came last goes on no sooner than the others */
    while (k3_host.generation == mine);
    k3_host.progress = true;
}

/* The value that lane `from` (0..15) of this team passes to the same exchange. Two places in turn: nobody
 * can be two exchanges ahead of a lane that has not read yet. */
static float __attribute__((noinline)) k3_host_exchange(float v, uint32_t from) {
    const uint32_t me = k3_host_lane, team = me & ~15u, n = ++k3_host.exchanges[me];
    k3_host.value[me][n & 1u] = v;
    k3_host.progress = true;
    for (uint32_t t = 0; t < 16u; t++)
        while (k3_host.exchanges[team + t] < n) k3_host_yield();
    k3_host.progress = true;
    return k3_host.value[team + from][n & 1u];
}

static void k3_host_entry() {
    k3_host.body(k3_host.argument);
    k3_host.done[k3_host_lane] = true;
    k3_host.progress = true;
    k3_host_yield();
    k3_host_fail("resumed after its end");
}

static void k3_host_start_lane(uint32_t lane) {
    void **top = (void **)(k3_host.stacks + (size_t)(lane + 1u) * K3_HOST_STACK);
    top -= 1; /* entry starts as if called: the stack pointer is 8 past a multiple of 16 */
    *--top = (void *)k3_host_entry;
    top -= 6; /* the six registers that the switch pops */
    k3_host.lane[lane] = top;
    k3_host.done[lane] = false;
    k3_host.exchanges[lane] = 0;
}

/* Give every unfinished lane of [first, first + n) a turn, from `start` by `step`; whether any got further. */
static bool k3_host_turn(uint32_t first, uint32_t n, uint32_t start, uint32_t step, uint32_t *left) {
    k3_host.progress = false;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t lane = first + (start + i * step) % n;
        if (k3_host.done[lane]) continue;
        k3_host_lane = lane;
        k3_host_switch(&k3_host.scheduler, k3_host.lane[lane]);
        *left -= k3_host.done[lane];
    }
    return k3_host.progress;
}

/* Run `body` on all lanes, with rule 1's rounding mode. */
static void k3_host_run(K3HostOrder order, void (*body)(void *), void *argument) {
    const uint32_t n = K3_HOST_LANES, before = _mm_getcsr();
    uint32_t left = n;
    if (!k3_host.stacks)
        k3_host.stacks = (char *)mmap(0, (size_t)n * K3_HOST_STACK, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (k3_host.stacks == MAP_FAILED) k3_host_fail("no memory for the stacks");
    k3_host.body = body, k3_host.argument = argument, k3_host.arrived = 0;
    for (uint32_t lane = 0; lane < n; lane++) k3_host_start_lane(lane);
    _mm_setcsr(0x9fc0u);
    while (left) {
        const uint32_t had = left, generation = k3_host.generation;
        bool moved = false;
        if (order == K3_HOST_STRIDED)
            moved = k3_host_turn(0u, n, 0u, 37u, &left);
        else
            for (uint32_t i = 0; i < n; i += 16u) {
                const uint32_t team = order == K3_HOST_FORWARD ? i : n - 16u - i;
                const uint32_t back = order == K3_HOST_FORWARD ? 0u : 15u; /* lane 0 last: it writes for others */
                while (generation == k3_host.generation && k3_host_turn(team, 16u, back, back ? 15u : 1u, &left))
                    moved = true;
                if (generation != k3_host.generation) break; /* a barrier opened: from the first team again */
            }
        if (!moved && left == had) k3_host_fail("waits for lanes that will never come");
    }
    _mm_setcsr(before);
}

#endif

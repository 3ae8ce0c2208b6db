/* The interpreter of a stream on a GPU, once for both vendors: one block of lanes is one worker. C++.
 *
 * A block takes the next entry of its window, waits for its counters, runs its slice, publishes; it knows no op. Blocks
 * are all resident (the launch is cooperative), entries lie in one topological order that every window keeps, so the
 * least unfinished entry can always go on.
 *
 * Waiting. One lane a counter polls; a serial walk would add up round trips. Then the data must become visible to all
 * lanes: on CUDA the polls acquire and a barrier passes it on; on HIP one acquire follows the polls, because one inside
 * the loop would throw the caches away at every look (K3_POLLS_ACQUIRE says which).
 *
 * Publishing. K3_RETIRE: every lane's stores have left it. Then one release.
 *
 * Several domains (an L2 cache each). Writing an L2 back and invalidating it costs the same for one block as for all of
 * the domain, so the blocks that run one instruction in one domain do it once. Words of (instruction, domain):
 *   arrived  counts blocks that have published; who brings it to `arrivals` releases for all and adds that number
 *   elected  who comes first waits on the instruction's counters and acquires for all
 *   open     set after that; the others look at this word alone, never at the counter, and drop only their own L1
 * Where an instruction waits for or signals a gate, or a domain has one entry of it, every block does its own:
 * an elected block's acquire at device scope says nothing of what a peer wrote, and `arrivals` must be exact.
 *
 * Faults. The first one stays in control->fault; everybody leaves when they see `stop`; the last block out fills the
 * results with NaN. No wait lasts longer than the deadline.
 *
 * The dialect supplies the atomics; see kernels_cuda/dialect.h for what each must do. */
#ifndef K3_SIMT_INTERP_H
#define K3_SIMT_INTERP_H

#include "simt_digest.h"
#include "simt_leaves.h"

#include "k3_ops.h"

#define K3_LOOKS_A_CHECK 64u /* polls between looks at the clock and at others' faults */

/* ---- giving up ------------------------------------------------------------------------------------ */

/* Whether to stop waiting: somebody has a fault, here or on another rank, or it takes too long. */
K3_FN int k3_gives_up(K3Block *b, const K3Launch *l, const K3Wait &wait, uint32_t got, uint64_t since) {
    K3FaultReport fault = {K3_FAULT_DEADLINE, l->phase, b->entry.inst, b->inst.op, K3_BLOCK, K3_BLOCK, wait.counter, got, wait.threshold, 0u};
    const uint32_t peer = k3_look(l->abort_word, K3_SYSTEM_SCOPE);
    if (k3_look(&l->control->stop, K3_DEVICE_SCOPE) != 0u) {
        b->stopped = 1u;
        return 1;
    }
    if (peer != 0u && peer != l->rank + 1u) {
        fault.code = K3_FAULT_PEER;
        fault.detail = peer - 1u;
    } else if (k3_clock() - since <= l->deadline_ticks) {
        return 0;
    }
    k3_raise(b, l, fault);
    return 1;
}

/* ---- taking --------------------------------------------------------------------------------------- */

/* By one lane, between two barriers: were a flag set by whoever finds a gate, the lane that clears it for the next entry
 * would race with those that still ask. */
K3_FN void k3_look_at_gates(K3Block *b, const K3Launch *l) {
    const K3Entry *e = &b->entry;
    uint32_t found = 0u;
    for (uint32_t i = 0; i < e->n_waits; i++) found |= l->waits[e->wait_ofs + i].counter;
    for (uint32_t i = 0; i < e->n_signals; i++) found |= l->signals[e->signal_ofs + i];
    b->is_system = found & K3_SYSTEM;
    b->party = 1u;
    if (l->n_domains > 1u && b->is_system == 0u) b->party = l->arrivals[(uint64_t)e->inst * l->n_domains + b->domain];
}

/* The next entry of the window into shared memory. Returns 0 where none is left or somebody has stopped. */
K3_FN int k3_take_entry(K3Block *b, const K3Launch *l) {
    if (K3_LANE0) {
        const uint32_t length = b->window1 - b->window0;
        const uint32_t n = l->order != 0 ? k3_take(k3_cursor(b, l)) : b->next++;
        const int is_over = n >= length || k3_look(&l->control->stop, K3_DEVICE_SCOPE) != 0u;
        b->at = is_over ? K3_NO_INDEX : l->order != 0 ? l->order[b->window0 + n] : b->window0 + n;
    }
    K3_SYNC(b);
    if (b->at == K3_NO_INDEX) return 0;
    if (K3_LANE0) {
        b->entry = l->entries[b->at];
        b->inst = l->insts[b->entry.inst];
        k3_look_at_gates(b, l);
    }
    K3_SYNC(b);
    return 1;
}

/* ---- waiting -------------------------------------------------------------------------------------- */

K3_FN void k3_wait_for(K3Block *b, const K3Launch *l, const K3Wait &wait) {
    const uint32_t *counter = k3_counter(l, k3_bank(b), wait.counter);
    const uint32_t scope = (wait.counter & K3_SYSTEM) != 0u ? K3_SYSTEM_SCOPE : K3_DEVICE_SCOPE;
    const uint64_t since = k3_clock();
    for (uint32_t n = 1u;; n++) {
        const uint32_t got = k3_poll(counter, scope);
        if (got >= wait.threshold) return;
        if (n % K3_LOOKS_A_CHECK == 0u && k3_gives_up(b, l, wait, got, since)) return;
        k3_pause();
    }
}

/* All of the entry's counters, and one acquire. */
K3_FN void k3_wait_all(K3Block *b, const K3Launch *l) {
    K3_FOR(i, 0u, (uint32_t)b->entry.n_waits) { k3_wait_for(b, l, l->waits[b->entry.wait_ofs + i]); }
    K3_SYNC(b);
    if (K3_POLLS_ACQUIRE) return; /* and the barrier has handed on what they saw */
    if (K3_LANE0) k3_acquire(b->is_system != 0u ? K3_SYSTEM_SCOPE : K3_DEVICE_SCOPE);
    K3_SYNC(b);
}

#ifdef K3_DOMAINS
/* The same once a domain. */
K3_FN void k3_wait_together(K3Block *b, const K3Launch *l) {
    uint32_t *words = k3_rendezvous(b, l);
    if (K3_LANE0) b->is_elected = k3_domain_count(&words[K3_ELECTED]) == 0u;
    K3_SYNC(b);
    if (b->is_elected != 0u) {
        k3_wait_all(b, l);
        if (K3_LANE0 && b->stopped == 0u) k3_domain_open(&words[K3_OPEN]);
        return;
    }
    if (K3_LANE0) {
        const K3Wait first = l->waits[b->entry.wait_ofs]; /* what a deadline names: it is not looked at */
        const uint64_t since = k3_clock();
        for (uint32_t n = 1u; !k3_domain_is_open(&words[K3_OPEN]); n++) {
            if (n % K3_LOOKS_A_CHECK == 0u && k3_gives_up(b, l, first, 0u, since)) break;
            k3_pause();
        }
        k3_domain_acquire();
    }
    K3_SYNC(b);
}
#endif

/* Returns 0 where the block must leave instead. */
K3_FN int k3_wait(K3Block *b, const K3Launch *l) {
    if (b->entry.n_waits == 0u) return 1;
#ifdef K3_DOMAINS
    if (b->party > 1u) k3_wait_together(b, l);
    else k3_wait_all(b, l);
#else
    k3_wait_all(b, l);
#endif
    return b->stopped == 0u;
}

/* ---- publishing ----------------------------------------------------------------------------------- */

K3_FN void k3_signal(const K3Launch *l, uint32_t bank, uint32_t id, uint32_t n) {
    if ((id & K3_SYSTEM) == 0u) {
        k3_add_release(k3_counter(l, bank, id), n);
        return;
    }
    k3_release_system(); /* once, not once a rank: it may write a whole cache back */
    for (uint32_t r = 0; r < l->n_ranks; r++) k3_add_system(k3_gate(l, bank, r, id & ~K3_SYSTEM), n);
}

K3_FN void k3_publish(K3Block *b, const K3Launch *l) {
    uint32_t n = 1u;
    K3_RETIRE(b);
#ifdef K3_DOMAINS
    if (b->party > 1u) {
        if (K3_LANE0) b->is_elected = k3_domain_count(&k3_rendezvous(b, l)[K3_ARRIVED]) + 1u == b->party;
        K3_SYNC(b);
        if (b->is_elected == 0u) return;
        n = b->party;
    }
#endif
    K3_FOR(i, 0u, (uint32_t)b->entry.n_signals) { k3_signal(l, k3_bank(b), l->signals[b->entry.signal_ofs + i], n); }
}

/* Clear the bank of the next step. Nobody can signal into it before this block arrives at the fold, and every rank has
 * passed the fold before, so nobody looks at it any more. */
K3_FN void k3_rearm(const K3Block *b, const K3Launch *l) {
    const uint32_t bank = k3_bank(b) ^ 1u;
    K3_FOR(i, 0u, l->max_counters) { *k3_line(l->counters, (uint64_t)bank * l->max_counters + i) = 0u; }
    K3_FOR(i, 0u, l->max_gates) { *k3_line(l->gates, (uint64_t)bank * l->max_gates + i) = 0u; }
    K3_FOR(i, 0u, l->max_cursors) { *k3_line(l->cursors, (uint64_t)bank * l->max_cursors + i) = 0u; }
    K3_FOR(i, 0u, l->max_rendezvous) {
        uint32_t *words = k3_line(l->rendezvous, (uint64_t)bank * l->max_rendezvous + i);
        words[K3_ARRIVED] = words[K3_ELECTED] = words[K3_OPEN] = 0u;
    }
}

/* ---- one entry ------------------------------------------------------------------------------------ */

#define K3_CASE(NAME, name)                               \
    case K3_OP_##NAME:                                    \
        k3_op_##name(c, inst, b->entry.unit0, b->entry.unit1); \
        break;

/* The slice. An opcode without a body here is a fault, never a no-op. */
K3_FN void k3_run_body(K3Block *b, const K3Launch *l) {
    K3Ctx *c = &b->ctx;
    const K3Inst *inst = &b->inst;
    if (K3_LANE0 && l->busy != 0) b->since = k3_clock();
    switch (inst->op) {
        K3_INTERP_OPS(K3_CASE)
        default:
            if (K3_LANE0) k3_trap(c, K3_FAULT_OPCODE, inst->op);
    }
    K3_SYNC(c);
    if (K3_LANE0 && l->busy != 0) b->busy += k3_clock() - b->since;
}

/* A trap of any lane is everybody's. */
K3_FN int k3_is_sound(K3Block *b, const K3Launch *l) {
    if (K3_LANE0 && b->ctx.fault != K3_FAULT_NONE) k3_raise_here(b, l, b->ctx.fault, b->ctx.fault_detail);
    K3_SYNC(b);
    return b->stopped == 0u;
}

/* ---- the launch ----------------------------------------------------------------------------------- */

/* Floats from one block's scratch to the next one's: whole cache lines, and the guard. */
K3_FN uint32_t k3_scratch_stride(uint32_t floats) { return (floats + 15u) / 16u * 16u + K3_GUARD_WORDS; }

/* Returns 0 where this block can do nothing here. */
K3_FN int k3_enter(K3Block *b, const K3Launch *l) {
    if (K3_LANE0) {
        float *scratch = l->scratch + (uint64_t)K3_BLOCK * k3_scratch_stride(l->scratch_floats);
        const K3Ctx c = {l->tensor, &b->step, scratch, l->scratch_floats, l->rank, l->n_ranks, l->max_tokens, l->peer_stride, 0u, 0u};
        b->ctx = c;
        b->step = *l->step;
        b->digest = 0u;
        b->next = b->is_elected = b->stopped = 0u;
        b->busy = 0u;
        b->began = l->busy != 0 ? k3_clock() : 0u;
        b->entry.inst = K3_NO_INDEX;
        b->inst.op = 0xffffu;
#ifdef K3_DOMAINS
        b->domain = l->n_domains > 1u ? k3_domain() : 0u; /* read once: it costs more than a take */
#else
        b->domain = 0u;
#endif
        const uint32_t window = l->order != 0 ? b->domain : K3_BLOCK;
        /* Never modulo: two physical domains in one window would share an elected block's L2. */
        if (window >= l->n_windows) k3_raise_here(b, l, K3_FAULT_RANGE, window);
        else {
            const uint32_t *bounds = l->windows + 2u * ((uint64_t)l->segment * l->n_windows + window);
            b->window0 = bounds[0];
            b->window1 = bounds[1];
        }
    }
    K3_SYNC(b);
    K3_FOR(i, 0u, K3_GUARD_WORDS) { b->ctx.scratch[b->ctx.scratch_floats + i] = k3_bits_to_f32(K3_SCRATCH_GUARD); }
    K3_SYNC(b);
    return b->stopped == 0u;
}

/* Every block takes in vain once a launch, so all cursors have passed their windows by as many as there were blocks. One
 * that was not cleared has passed already: then nothing runs, and the counters that were not cleared either look right.
 * Reported as the counter behind the last one. */
K3_FN void k3_audit_cursors(K3Block *b, const K3Launch *l) {
    const uint32_t n = l->n_segments * l->n_windows;
    uint32_t taken = 0u;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t *cursor = k3_line(l->cursors, (uint64_t)k3_bank(b) * l->max_cursors + i);
        taken += k3_look(cursor, K3_DEVICE_SCOPE) - (l->windows[2u * i + 1u] - l->windows[2u * i]);
    }
    if (taken == l->n_blocks * l->n_segments) return;
    const K3FaultReport fault = {K3_FAULT_AUDIT, l->phase, K3_NO_INDEX, 0xffffu, K3_NO_INDEX, K3_BLOCK, l->n_counters, taken, l->n_blocks * l->n_segments, 0u};
    k3_raise(b, l, fault);
}

/* Every counter must end where its producers add up to: a value above is a double signal, below an entry that never
 * ran, and thresholds that happen to be met hide both. */
K3_FN void k3_audit(K3Block *b, const K3Launch *l) {
    if (K3_LANE0 && l->order != 0) k3_audit_cursors(b, l);
    K3_FOR(i, 0u, l->n_counters + l->n_gates) {
        const uint32_t id = i < l->n_counters ? i : (i - l->n_counters) | K3_SYSTEM;
        const uint32_t got = k3_look(k3_counter(l, k3_bank(b), id), K3_SYSTEM_SCOPE);
        if (got != l->expect[i]) {
            const K3FaultReport fault = {K3_FAULT_AUDIT, l->phase, K3_NO_INDEX, 0xffffu, K3_NO_INDEX, K3_BLOCK, id, got, l->expect[i], 0u};
            k3_raise(b, l, fault);
        }
    }
    K3_SYNC(b);
}

/* A step that failed must not look like a result. */
K3_FN void k3_poison(const K3Launch *l) {
    uint32_t *output = (uint32_t *)l->tensor[l->output_handle], *logits = (uint32_t *)l->tensor[l->logits_handle];
    K3_FOR(i, 0u, (uint32_t)(l->output_bytes / 4u)) { output[i] = 0xffffffffu; }
    K3_FOR(i, 0u, (uint32_t)(l->logits_bytes / 4u)) { logits[i] = 0xffffffffu; }
}

/* Once a launch, not after each body: a read of memory would lengthen every hand-off. */
K3_FN void k3_check_scratch(K3Block *b, const K3Launch *l) {
    K3_FOR(i, 0u, K3_GUARD_WORDS) {
        if (k3_f32_to_bits(b->ctx.scratch[b->ctx.scratch_floats + i]) != K3_SCRATCH_GUARD) {
            const K3FaultReport fault = {K3_FAULT_SCRATCH, l->phase, K3_NO_INDEX, 0xffffu, K3_BLOCK, K3_BLOCK, 0u, 0u, 0u, l->scratch_floats};
            k3_raise(b, l, fault);
        }
    }
}

/* Whoever leaves last looks at the whole: audit after the last segment, NaN after a fault. */
K3_FN void k3_leave(K3Block *b, const K3Launch *l, uint64_t digest) {
    if (digest != 0u) k3_block_add(&b->digest, digest);
    k3_check_scratch(b, l);
    K3_RETIRE(b);
    if (K3_LANE0) {
        if (b->digest != 0u) k3_add64(&l->control->digest, b->digest);
        if (l->busy != 0) {
            l->busy[2u * K3_BLOCK] += b->busy; /* nobody else's words */
            l->busy[2u * K3_BLOCK + 1u] += k3_clock() - b->began;
        }
        b->is_elected = k3_count_out(&l->control->departed) + 1u == l->n_blocks;
    }
    K3_SYNC(b);
    if (b->is_elected == 0u) return;
    if (K3_LANE0) {
        k3_acquire(K3_SYSTEM_SCOPE);
        b->stopped = k3_look(&l->control->stop, K3_DEVICE_SCOPE);
        l->control->departed = 0u;
    }
    K3_SYNC(b);
    const int is_audited = b->stopped == 0u && l->segment + 1u == l->n_segments;
    K3_SYNC(b); /* a lane that finds a fault says so where the others have just asked */
    if (is_audited) k3_audit(b, l);
    if (b->stopped != 0u) k3_poison(l);
}

K3_FN void k3_interpret(K3Block *b, const K3Launch *l) {
    uint64_t digest = 0u; /* this lane's part of all its block's results */
    if (k3_enter(b, l)) {
        while (k3_take_entry(b, l)) {
            if (!k3_wait(b, l)) break;
            k3_run_body(b, l);
            if (!k3_is_sound(b, l)) break;
            if ((b->entry.flags & K3_ENTRY_DIGEST) != 0u) digest += k3_digest(b, l);
            if ((b->entry.flags & K3_ENTRY_REARM) != 0u) k3_rearm(b, l);
            k3_publish(b, l);
        }
    }
    k3_leave(b, l, digest);
}

/* ---- the object ----------------------------------------------------------------------------------- */

#ifdef K3_FLASH
#define K3_IS_FLASH K3_CAN_FLASH
#else
#define K3_IS_FLASH 0u
#endif
#ifdef K3_DOMAINS
#define K3_CAPABILITY (K3_CAN_WINDOWS | K3_CAN_COLLECTIVES | K3_CAN_SEGMENTS | K3_IS_FLASH)
#else
#define K3_CAPABILITY (K3_CAN_COLLECTIVES | K3_CAN_SEGMENTS | K3_IS_FLASH)
#endif

/* Word w of the set of opcodes that k3_run_body has. */
#define K3_OP_BIT(NAME, name) | ((K3_OP_##NAME) / 32u == w ? 1u << ((K3_OP_##NAME) % 32u) : 0u)
template <uint32_t w>
struct K3OpWord {
    static constexpr uint32_t bits = 0u K3_INTERP_OPS(K3_OP_BIT);
};

#define K3_IDENTITY                                                                                         \
    {                                                                                                       \
        {'K', '3', 'O', 'B', 'J', 'E', 'C', 'T'}, K3_OBJECT_VERSION, K3_PHASES, K3_BLOCK_LANES, K3_CAPABILITY,  \
            sizeof(K3Launch), K3_N_LAUNCH_FIELDS, K3_ISA_HASH,                                      \
            {K3OpWord<0>::bits, K3OpWord<1>::bits, K3OpWord<2>::bits, K3OpWord<3>::bits, K3OpWord<4>::bits, \
             K3OpWord<5>::bits, K3OpWord<6>::bits, K3OpWord<7>::bits},                                      \
            {K3_LAUNCH_FIELDS(K3_LAUNCH_OFFSET)}, K3_LAUNCH_FIELDS(K3_LAUNCH_NAME)                          \
    }

/* What a hand-off is measured against: asked = {blocks, rounds, most looks a round}, and in every round all blocks arrive
 * and wait for all. Without rounds an empty kernel. A counter that does not end at blocks * rounds: somebody gave up. */
#define K3_BARRIER_KERNEL(kernel)                                                             \
    extern "C" __global__ void kernel(const uint32_t *asked, uint32_t *arrived) {             \
        for (uint32_t round = 1u; round <= asked[1]; round++) {                               \
            K3_RETIRE(asked);                                                                 \
            if (K3_LANE0) {                                                                   \
                k3_add_release(arrived, 1u);                                                  \
                for (uint32_t look = 0u; look < asked[2]; look++) {                           \
                    if (k3_poll(arrived, K3_DEVICE_SCOPE) >= asked[0] * round) break;         \
                    k3_pause();                                                               \
                }                                                                             \
                if (!K3_POLLS_ACQUIRE) k3_acquire(K3_DEVICE_SCOPE);                           \
            }                                                                                 \
            K3_SYNC(asked);                                                                   \
        }                                                                                     \
    }

/* Rule 1's canaries, to be run before the first step: in = {a, c, subnormal, 1, 2^-126, 2, -2^-76, 2^-76}, for the
 * host to compare out with what the contract says. No operand is a constant: x * 1 would be folded to x. */
#define K3_CANARY_KERNEL(kernel)                                              \
    extern "C" __global__ void kernel(const float *in, float *out) {          \
        if (!K3_LANE0) return;                                                \
        out[0] = in[0] * in[0] + in[1];                                       \
        out[1] = in[2] * in[3];                                               \
        out[2] = in[4] / in[5];                                               \
        out[3] = k3_fma(in[6], in[7], in[4]);                                 \
    }

#endif

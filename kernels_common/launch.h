/* What one launch of a GPU interpreter is given, and what an interpreter's object says of itself. C++.
 *
 * The kernel's one argument points to a K3Launch in device memory. Python writes it (k3tool/runtime/gpu_object.py has
 * the same fields) and refuses an object whose own list differs: a kernarg read at a wrong offset is a write anywhere.
 *
 * Peers: rank r's gates and peer buffers lie (r - rank) * peer_stride bytes from this rank's; the host reserves one
 * range of addresses and maps each rank's memory into it.
 * Banks: counters, cursors and rendezvous of a step lie in the bank of its epoch's lowest bit (architecture,
 * section 4). All of them are one word, or three, in a line of K3_LINE bytes.
 * `busy` is 0, or takes two words a block: ticks in bodies, and from its first entry to its end. */
#ifndef K3_LAUNCH_H
#define K3_LAUNCH_H

#include "protocol.h"

/* Shared by all launches of a rank; zero at the start. */
typedef struct K3Control {
    uint32_t stop;     /* a fault was raised: everybody leaves */
    uint32_t departed; /* blocks that have left this launch */
    uint64_t digest;   /* of the steps so far */
    K3FaultReport fault;
} K3Control;

/* What a digest must know of a tensor, by handle. */
typedef struct K3ResultRow {
    uint32_t row_elems, replicated;
} K3ResultRow;

/* A window is what one cursor walks: one domain's entries in instruction order, named by `order`; where `order` is 0,
 * one block's own queue. windows[segment][window]: its first entry and the one behind its last. */
#define K3_LAUNCH_FIELDS(X)           \
    X(const K3Inst *, insts)          \
    X(const K3Entry *, entries)       \
    X(const uint32_t *, order)        \
    X(const uint32_t *, windows)      \
    X(const K3Wait *, waits)          \
    X(const uint32_t *, signals)      \
    X(const uint32_t *, expect)       \
    X(const uint32_t *, arrivals)     \
    X(const K3OpRow *, ops)           \
    X(const K3ResultRow *, results)   \
    X(void *const *, tensor)          \
    X(const K3Step *, step)           \
    X(float *, scratch)               \
    X(char *, counters)               \
    X(char *, gates)                  \
    X(char *, cursors)                \
    X(char *, rendezvous)             \
    X(K3Control *, control)           \
    X(uint32_t *, abort_word)         \
    X(uint64_t *, busy)               \
    X(uint64_t, deadline_ticks)       \
    X(int64_t, peer_stride)           \
    X(uint64_t, output_bytes)         \
    X(uint64_t, logits_bytes)         \
    X(uint32_t, output_handle)        \
    X(uint32_t, logits_handle)        \
    X(uint32_t, phase)                \
    X(uint32_t, segment)              \
    X(uint32_t, n_segments)           \
    X(uint32_t, n_windows)            \
    X(uint32_t, n_domains)            \
    X(uint32_t, n_blocks)             \
    X(uint32_t, n_counters)           \
    X(uint32_t, n_gates)              \
    X(uint32_t, max_counters)         \
    X(uint32_t, max_gates)            \
    X(uint32_t, max_cursors)          \
    X(uint32_t, max_rendezvous)       \
    X(uint32_t, rank)                 \
    X(uint32_t, n_ranks)              \
    X(uint32_t, max_tokens)           \
    X(uint32_t, scratch_floats)

#define K3_LAUNCH_MEMBER(type, name) type name;
typedef struct K3Launch {
    K3_LAUNCH_FIELDS(K3_LAUNCH_MEMBER)
} K3Launch;

/* What an object can serve. */
#define K3_CAN_WINDOWS 1u     /* several domains: windows, two-level rendezvous */
#define K3_CAN_COLLECTIVES 2u /* more than one rank */
#define K3_CAN_SEGMENTS 4u    /* a step in several launches */
#define K3_CAN_FLASH 8u       /* pages of latent attention in shared memory: simt_flash.h */

#define K3_OBJECT_VERSION 1u
#define K3_LAUNCH_ONE(type, name) +1u
#define K3_LAUNCH_NAME(type, name) #name "\n"
#define K3_LAUNCH_OFFSET(type, name) (uint16_t)__builtin_offsetof(K3Launch, name),
#define K3_N_LAUNCH_FIELDS (0u K3_LAUNCH_FIELDS(K3_LAUNCH_ONE))

/* Read from the object's file, before it is loaded. `phases` has a bit for each. */
typedef struct K3Identity {
    char magic[8]; /* K3OBJECT */
    uint32_t version, phases, lanes, capability, launch_bytes, n_fields;
    char isa_hash[72];
    uint32_t ops[8];   /* bit op % 32 of word op / 32 */
    uint16_t offset[K3_N_LAUNCH_FIELDS];
    char fields[512];
} K3Identity;

#endif

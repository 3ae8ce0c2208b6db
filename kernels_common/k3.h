/* What an op body sees: the record, the step's parameters, the context of one virtual workgroup.
 *
 * The structures here are written by Python (k3tool/runtime) and read by every interpreter, so their
 * layout is part of the ABI: little-endian, no padding beyond what is spelled out, sizes asserted.
 * An op body takes the decoded record and the context. It knows nothing of scheduling, never waits
 * and never signals: the interpreter waits, calls and publishes in one place. A body that meets an
 * expert whose bytes are still coming says which and returns; it is called again when they are there.
 */
#ifndef K3_H
#define K3_H

#include "dialect.h" /* K3_FN, K3_FOR, K3_LANE0, K3_SYNC, K3_RESTRICT: each target's own, found by include path */
#include "gen/k3_isa.h"

typedef struct K3Inst { /* 64 bytes: k3tool/isa/table.py says which word is what */
  uint16_t op, flags;
  uint16_t handle[K3_N_HANDLES];
  uint32_t n_units;   /* units that slices divide */
  uint32_t width;     /* elements of the result per token */
  uint32_t unit_cols; /* columns of the result per unit; 0 where a unit is a token or the step */
  uint32_t param[K3_N_PARAMS];
} K3Inst;

typedef struct K3Entry { /* 32 bytes: one slice of one instruction in a workgroup's queue */
  uint32_t inst;
  uint32_t unit0, unit1; /* half-open */
  uint32_t wait_ofs, signal_ofs;
  uint16_t n_waits, n_signals;
  uint16_t slice, flags;
  uint32_t reserved; /* 0 */
} K3Entry;

typedef struct K3Wait { /* counter with K3_SYSTEM: a gate in this rank's peer segment */
  uint32_t counter, threshold;
} K3Wait;

#define K3_SYSTEM 0x80000000u
#define K3_ENTRY_DIGEST 1u /* the result is the same on every rank: fold its bits into the step's digest */
#define K3_ENTRY_REARM 2u  /* clear the counters' other bank before signalling (see architecture, section 4) */

typedef struct K3Expert { /* one row of an expert table: the tensor of a "weight" operand of a MOE_* op */
  const uint8_t* packed;
  const uint8_t* scale;
} K3Expert;

/* What an expert's `packed` is from the moment a fetch has a slot for it until its bytes are whole. */
#define K3_COMING ((uintptr_t)1)

#ifdef K3_EXPERTS_COME
/* Acquires: whoever stores the pointer has stored the bytes, and the expert's other pointers, before. */
K3_FN uintptr_t k3_expert_state(const K3Expert* e) { return (uintptr_t)__atomic_load_n(&e->packed, __ATOMIC_ACQUIRE); }
K3_FN int k3_is_coming(const K3Expert* e) { return k3_expert_state(e) == K3_COMING; }
K3_FN int k3_may_touch(const K3Expert* e) { return k3_expert_state(e) > K3_COMING; }
#else
K3_FN int k3_is_coming(const K3Expert* e) { (void)e; return 0; }
K3_FN int k3_may_touch(const K3Expert* e) { (void)e; return 1; }
#endif

/* What varies from step to step. Instructions read it; streams are never patched. */
typedef struct K3Step {
  uint32_t n_tokens;  /* tokens in this step, at most the program's max_tokens */
  uint32_t head_from; /* the head (final linear, argmax) runs on tokens head_from.. only; n_tokens: on none */
  uint32_t epoch;     /* steps since the start; its lowest bit is the counters' bank */
  uint32_t max_pages; /* columns of page_table */
  const uint32_t* token_id; /* [n_tokens] */
  const uint32_t* position; /* [n_tokens] absolute position in the token's sequence */
  const uint32_t* slot;     /* [n_tokens] the sequence's slot */
  const uint32_t* page_table; /* [n_slots][max_pages] page of the latent cache that holds positions 256*column.. */
} K3Step;

enum K3Fault {
  K3_FAULT_NONE = 0,
  K3_FAULT_OPCODE = 1,    /* no handler for the opcode */
  K3_FAULT_NONFINITE = 2, /* NaN or infinity in a norm's input, router scores or logits */
  K3_FAULT_DEADLINE = 3,  /* a wait took longer than the deadline */
  K3_FAULT_SCRATCH = 4,   /* an op asked for more scratch than the program declares */
  K3_FAULT_RANGE = 5,     /* a token id, position, slot or expert id out of range */
  K3_FAULT_AUDIT = 6,     /* a counter's final value is not what its producers add up to */
  K3_FAULT_PEER = 7,      /* another rank stopped */
  K3_FAULT_ABSENT = 34    /* an expert was to be used that is not in memory */
};

typedef struct K3Ctx {
  void* const* tensor; /* by handle; an expert leaf's tensor is K3Expert[n_experts] */
  const K3Step* step;
  float* scratch; /* this workgroup's, scratch_floats long, 64-byte aligned */
  uint32_t scratch_floats;
  uint32_t rank, n_ranks;
  uint32_t max_tokens; /* of the program: the token dimension of blocks */
  int64_t peer_stride; /* bytes from one rank's peer segment to the next rank's */
  uint32_t fault;        /* K3Fault of the first trap in this workgroup, else 0 */
  uint32_t fault_detail; /* what the op knows: token, expert or row */
#ifdef K3_EXPERTS_COME
  const K3Expert* awaits; /* an expert that is still coming: the op has returned before its end */
  uint32_t resume;        /* steps of its work that an op so interrupted has done */
#endif
#ifdef K3_KEEPS_X
  uint64_t serial;     /* of an instruction in a step, no two alike in a process; 0: none */
  const float* same_x; /* what k3_same_x was told in this slice */
#endif
} K3Ctx;

K3_STATIC_ASSERT(sizeof(K3Inst) == 64, "a record is 64 bytes");
K3_STATIC_ASSERT(sizeof(K3Entry) == 32, "an entry is 32 bytes");
K3_STATIC_ASSERT(sizeof(K3Wait) == 8, "a wait is 8 bytes");

/* The tensor of an operand, as written in the generated header (K3_GEMV_BF16_X and so on): a handle slot, and how far
 * behind that slot's handle it lies where operands share one. */
K3_FN void* k3_tensor(const K3Ctx* c, const K3Inst* inst, uint32_t operand) {
  return c->tensor[inst->handle[operand & ((1u << K3_RUN_SHIFT) - 1u)] + (operand >> K3_RUN_SHIFT)];
}

/* Rank r's copy of a tensor that lives in the peer segment; own copy when r is c->rank. */
K3_FN const float* k3_peer(const K3Ctx* c, const K3Inst* inst, uint32_t slot, uint32_t r) {
  const char* own = (const char*)k3_tensor(c, inst, slot);
  return (const float*)(own + ((int64_t)r - (int64_t)c->rank) * c->peer_stride);
}

K3_FN float k3_f32_param(const K3Inst* inst, uint32_t index) { return k3_bits_to_f32(inst->param[index]); }

/* Record a fault; the first one stays. The interpreter stops the workgroup after the body returns. */
K3_FN void k3_trap(K3Ctx* c, uint32_t fault, uint32_t detail) {
  if (c->fault == K3_FAULT_NONE) {
    c->fault_detail = detail;
    c->fault = fault;
  }
}

#endif

/* The image: everything one rank needs, as one flat file that this process maps and never changes.
 *
 * Written by k3tool/runtime/image.py for one run and read here; both sides refuse another version. It is
 * little-endian, sections start on 64 bytes, and every offset, count and index in it is checked once by
 * k3_image_open before anything is used, because a bad index in a stream is a write anywhere in memory.
 */
#ifndef K3_CPU_IMAGE_H
#define K3_CPU_IMAGE_H

#include "../kernels_common/protocol.h"

#define K3_IMAGE_MAGIC "K3IMAGE"
#define K3_IMAGE_VERSION 3u
#define K3_N_PHASES 2u /* 0 decode, 1 prefill: the order of ALL_PHASES in k3tool/isa/table.py */
#define K3_N_OPCODES 256u
#define K3_MOST_DEVICES 8u
#define K3_SEGMENT_HEADER 4096u /* before the ranks' segments in the shared file: abort word, progress */

/* What a section holds; per-phase kinds come once for each phase. */
enum K3SectionKind {
    K3_SECTION_PHASE = 1, /* K3PhaseRow[1] */
    K3_SECTION_INST,      /* K3Inst */
    K3_SECTION_ENTRY,     /* K3Entry, by workgroup, in packet order */
    K3_SECTION_QUEUE,     /* u32[n_workgroups + 1] */
    K3_SECTION_WAIT,      /* K3Wait */
    K3_SECTION_SIGNAL,    /* u32 counter, or gate | K3_SYSTEM */
    K3_SECTION_EXPECT,    /* u32[n_counters + n_gates]: every counter's final value */
    K3_SECTION_OP,        /* K3OpRow[K3_N_OPCODES] */
    K3_SECTION_TENSOR,    /* K3TensorRow by handle */
    K3_SECTION_EXPERT,    /* K3ExpertRow */
    K3_SECTION_FILE,      /* K3FileRow */
    K3_SECTION_TEXT,      /* bytes: paths, each ending in 0 */
    K3_SECTION_PROMPT,    /* u32 token ids */
    K3_SECTION_STOP,      /* u32 token ids that end the run */
    K3_N_SECTION_KINDS
};

typedef struct K3SectionRow {
    uint32_t kind, phase;
    uint64_t offset, count;
    uint32_t elem_bytes, reserved;
} K3SectionRow;

typedef struct K3ImageHeader {
    char magic[8];
    uint32_t version, n_sections;
    uint64_t file_bytes;
    uint64_t checksum; /* of all bytes with this field 0: k3_image_checksum */
    char isa_hash[64];
    uint32_t rank, n_ranks, n_workgroups, n_slots;
    uint32_t max_pages, max_context; /* pages a slot has; positions it may use */
    uint32_t max_counters, max_gates; /* over the phases: what a bank holds */
    uint64_t arena_bytes, private_bytes, peer_bytes; /* peer_bytes: one rank's peer buffers, without gates */
    uint32_t chunk, n_gen, all_logits, vocab;
    uint32_t first_phase; /* phase of the program that reads the prompt */
    uint32_t n_load_queues, n_fetch_queues; /* the last workgroups, each a thread of its own; 0: no memory budget */
    uint32_t n_expert_slots;
    uint64_t ring_bytes, pinned_bytes, slot_bytes; /* of one slot of the expert cache */
} K3ImageHeader;

typedef struct K3PhaseRow {
    uint32_t max_tokens, scratch_floats, n_counters, n_gates;
    uint32_t output_handle, logits_handle, logits_cols, reserved;
} K3PhaseRow;

/* Under a memory budget weights are not mapped (but for the embedding, of which a token needs one row): PINNED ones are
 * read at the start, those of the RING come and go, SLOTS are the experts' cache. */
enum K3Place { K3_PLACE_FILE = 1, K3_PLACE_EXPERTS, K3_PLACE_ARENA, K3_PLACE_PEER, K3_PLACE_PRIVATE, K3_PLACE_PINNED, K3_PLACE_RING, K3_PLACE_SLOTS };
typedef struct K3TensorRow {
    uint32_t place, elem_bytes;
    uint64_t offset, bytes;         /* in its file, arena, peer segment or private memory */
    uint32_t file, row_elems;       /* row_elems: of an activation */
    uint32_t expert0, n_experts;    /* rows of the expert section */
    uint64_t packed_bytes, scale_bytes; /* of one expert */
    uint32_t replicated;            /* the same on every rank */
    uint32_t is_primed;             /* RING: there when a step starts, so also before the first */
    uint64_t home;                  /* RING, PINNED: of the pages that enclose it, in that memory */
} K3TensorRow;

typedef struct K3ExpertRow {
    uint32_t packed_file, scale_file;
    uint64_t packed_offset, scale_offset;
} K3ExpertRow;

typedef struct K3FileRow {
    uint64_t path_offset, bytes; /* bytes: the size the checkpoint's header promised */
    uint32_t copy;               /* a later row that holds the same bytes on another device, K3_NO_INDEX: none */
    uint32_t device;             /* number of its folder, as the user named them */
} K3FileRow;

K3_STATIC_ASSERT(sizeof(K3SectionRow) == 32, "written by image.py");
K3_STATIC_ASSERT(sizeof(K3ImageHeader) == 208, "written by image.py");
K3_STATIC_ASSERT(sizeof(K3PhaseRow) == 32, "written by image.py");
K3_STATIC_ASSERT(sizeof(K3TensorRow) == 72, "written by image.py");
K3_STATIC_ASSERT(sizeof(K3ExpertRow) == 24, "written by image.py");
K3_STATIC_ASSERT(sizeof(K3FileRow) == 24, "written by image.py");

/* One phase's program, as pointers into the mapped image. */
typedef struct K3Program {
    K3PhaseRow row;
    const K3Inst *insts;
    const K3Entry *entries;
    const uint32_t *queue;
    const K3Wait *waits;
    const uint32_t *signals;
    const uint32_t *expect;
    uint32_t n_insts, n_entries, n_waits, n_signals;
} K3Program;

/* What experts have been checked since the start (numerics rule 4): one byte an expert row. */
typedef struct K3Image {
    const K3ImageHeader *header;
    K3Program program[K3_N_PHASES]; /* n_entries 0: the phase is absent */
    const K3OpRow *ops;
    const K3TensorRow *tensors;
    const K3ExpertRow *experts;
    const K3FileRow *files;
    const char *text;
    const uint32_t *prompt, *stop;
    uint32_t n_tensors, n_experts, n_files, n_prompt, n_stop;
    uint64_t text_bytes;
} K3Image;

/* Map and check an image (its checksum: an order-free sum over 8-byte words of k3_mix(word ^ k3_mix(index))). Returns 0, or -1 with one line in `why`. */
int k3_image_open(K3Image *image, const char *path, char *why, size_t why_bytes);

#endif

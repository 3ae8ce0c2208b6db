/* What a rank tells the driver: fixed records on a pipe, each written at once.
 * k3tool/runtime/records.py reads them. */
#ifndef K3_CPU_RECORD_H
#define K3_CPU_RECORD_H

#include "interp.h"

enum K3RecordKind {
    K3_RECORD_READY = 1, /* mapped, canaries passed; `name` is the leaf set */
    K3_RECORD_PROMPT,    /* a step that wanted no choice is done */
    K3_RECORD_TOKEN,     /* a token was chosen; a step gives one of these for each token it wanted */
    K3_RECORD_FAULT,
    K3_RECORD_END,       /* nothing follows */
    K3_RECORD_DONE       /* a state was copied */
};

typedef struct K3Record {
    uint32_t kind, rank, step, phase; /* step: the request's number */
    uint32_t position, n_tokens;      /* of the token the choice follows, else of the last; tokens in the step */
    uint32_t id;
    float best, second; /* logits */
    uint32_t slot; /* of that token */
    uint64_t digest, logits_digest; /* logits_digest: this rank's columns; the ranks' sum is the whole */
    uint64_t ns, peak_bytes;
    K3FaultReport fault;
    char name[16];
    K3IoFault io;              /* FAULT with code K3_FAULT_IO: what could not be read */
    uint64_t n_hits, n_misses; /* END: experts found in the cache, and not */
    uint64_t n_read_bytes;     /* END: from storage, by the steps; 0 where weights are mapped */
    int32_t trace_error;       /* END: errno that ended the trace of experts */
    uint32_t is_direct;        /* READY: reads go around the page cache */
    uint64_t n_device_bytes[K3_MOST_DEVICES]; /* END: n_read_bytes by folder */
} K3Record;

K3_STATIC_ASSERT(sizeof(K3Record) == 256, "read by records.py");

#endif

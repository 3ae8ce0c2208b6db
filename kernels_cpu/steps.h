/* What the driver asks of a rank, request by request on a pipe, and the rank's answers. k3tool/runtime/requests.py writes
 * requests, records.py reads answers. */
#ifndef K3_CPU_STEPS_H
#define K3_CPU_STEPS_H

#include "record.h"

enum K3RequestKind {
    K3_REQUEST_STEP = 1, /* n rows of K3RequestToken follow: run them */
    K3_REQUEST_SAVE,     /* n rows of K3RequestSpan follow: copy them into the exchange file, and say K3_RECORD_DONE */
    K3_REQUEST_RESTORE   /* the same from the exchange file */
};

typedef struct K3Request { /* 32 bytes, then n rows */
    uint32_t kind, n;
    uint32_t phase;     /* program that runs the step */
    uint32_t n_wanted;  /* of the last so many tokens a record says what was chosen */
    uint32_t head_from; /* the head runs on tokens from here on */
    uint32_t row;       /* of the logits file for the first of them, K3_NO_INDEX: nobody asked */
    uint32_t number;    /* what records call the step: tokens chosen before it */
    uint32_t reserved;  /* 0 */
} K3Request;

typedef struct K3RequestToken {
    uint32_t id, position, slot;
} K3RequestToken;

typedef struct K3RequestSpan { /* bytes of a private tensor, and where they lie in the exchange file */
    uint32_t handle, reserved;
    uint64_t offset, bytes, at;
} K3RequestSpan;

K3_STATIC_ASSERT(sizeof(K3Request) == 32, "written by requests.py");
K3_STATIC_ASSERT(sizeof(K3RequestToken) == 12, "written by requests.py");
K3_STATIC_ASSERT(sizeof(K3RequestSpan) == 32, "written by requests.py");

/* One rank, ready to run steps. */
typedef struct K3Rank {
    K3Image image;
    K3Memory memory;
    K3Team team;
    K3RequestToken *asked; /* room for the longest step, as are the three below */
    uint32_t *token_id, *position, *slot;
    uint32_t *page_table, *next; /* next [n_slots]: of a step's tokens so far, the position that follows in each slot */
    uint32_t epoch;
    int record_fd;
    K3Request now; /* what is being answered */
    K3IoFault lost; /* of a mapped file; kind K3_IO_FINE: none */
    const char *exchange; /* path of the file that SAVE writes and RESTORE reads */
} K3Rank;

/* Set up what steps need beside image, memory and team. Returns 0, or -1 for no memory. */
int k3_steps_open(K3Rank *r);

/* Answer requests from `fd` until it is closed. Every field is checked before it is used: whatever comes, no byte outside the
 * rank's own is touched. Returns the exit code: 0, 1 where the driver has gone, 4 after a fault record. */
int k3_serve(K3Rank *r, int fd);

void k3_send_record(const K3Rank *r, const K3Record *record);

#endif

/* A per-slice trace in a file that the driver made: who ran what, from when to when. Off unless asked for.
 *
 * The file: one K3TraceLine a worker, then `capacity` events a worker; its size says how many. A worker whose
 * part is full counts what it drops and runs on. k3tool/runtime/trace.py reads it. */
#ifndef K3_CPU_TRACE_H
#define K3_CPU_TRACE_H

#include "image.h"

typedef struct K3Event {
    uint32_t step, inst; /* inst K3_NO_INDEX: the step itself, by worker 0 */
    uint32_t workgroup;
    uint16_t worker, phase;
    uint64_t start_ns, end_ns;
} K3Event;

typedef struct __attribute__((aligned(K3_LINE))) K3TraceLine {
    uint64_t n_events, n_dropped;
} K3TraceLine;

typedef struct K3Trace {
    K3TraceLine *line; /* 0: no trace */
    K3Event *events;   /* [n_threads][capacity] */
    uint64_t capacity;
} K3Trace;

/* Map the file. Returns 0, or -1 with one line in `why`. */
int k3_trace_open(K3Trace *trace, const char *path, uint32_t n_threads, char *why, size_t why_bytes);

static inline void k3_trace_add(const K3Trace *trace, const K3Event *event) {
    K3TraceLine *line = &trace->line[event->worker];
    if (line->n_events == trace->capacity) line->n_dropped++;
    else trace->events[event->worker * trace->capacity + line->n_events++] = *event;
}

K3_STATIC_ASSERT(sizeof(K3Event) == 32, "read by trace.py");
K3_STATIC_ASSERT(sizeof(K3TraceLine) == 64, "read by trace.py");

#endif

/* Requests of the driver: read one, check all of it, run it, answer. A rank decides nothing: it runs the tokens it is given,
 * and what it says was chosen is the folded argmax, which is the same on every rank. */
#define _GNU_SOURCE
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NOT_YET 0xffffffffu

void k3_send_record(const K3Rank *r, const K3Record *record) {
    if (write(r->record_fd, record, sizeof *record) != (ssize_t)sizeof *record) _exit(1);
}

/* Returns 1 for all bytes, 0 where the pipe ended before the first, -1 where it ended or failed in the middle. */
static int read_all(int fd, void *data, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t got = read(fd, (char *)data + done, n - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return done == 0 && got == 0 ? 0 : -1;
        done += (size_t)got;
    }
    return 1;
}

static uint32_t most_tokens(const K3Image *image) {
    uint32_t most = 1;
    for (uint32_t p = 0; p < K3_N_PHASES; p++)
        if (image->program[p].n_entries > 0 && image->program[p].row.max_tokens > most) most = image->program[p].row.max_tokens;
    return most;
}

int k3_steps_open(K3Rank *r) {
    const K3ImageHeader *h = r->image.header;
    const uint32_t most = most_tokens(&r->image);
    r->asked = calloc(most, sizeof *r->asked);
    r->token_id = calloc(most, 4);
    r->position = calloc(most, 4);
    r->slot = calloc(most, 4);
    r->next = calloc(h->n_slots, 4);
    r->page_table = calloc((size_t)h->n_slots * h->max_pages, 4);
    if (r->asked == NULL || r->token_id == NULL || r->position == NULL || r->slot == NULL || r->next == NULL || r->page_table == NULL) return -1;
    for (uint32_t i = 0; i < h->n_slots * h->max_pages; i++) r->page_table[i] = i; /* every slot owns its pages */
    return 0;
}

/* ---- faults ---------------------------------------------------------------------------------------- */

static void send_fault(const K3Rank *r, const K3Request *q, uint32_t position) {
    K3Record record = {.kind = K3_RECORD_FAULT, .rank = r->image.header->rank, .step = q->number, .phase = q->phase,
                       .position = position, .fault = r->team.fault};
    if (r->lost.kind != K3_IO_FINE) record.io = r->lost;
    else if (r->memory.residency != NULL) record.io = r->memory.residency->io_fault;
    k3_send_record(r, &record);
}

static K3FaultReport loss(const K3Rank *r) {
    return (K3FaultReport){.code = K3_FAULT_IO, .phase = r->now.phase, .inst = K3_NO_INDEX, .opcode = 0xffff, .detail = r->lost.file};
}

static K3Rank *watched; /* a handler is given no argument of ours */

/* A page of a mapped file could not be had: the file was cut, or its device failed. The thread cannot go on; say what was lost.
 * Where the page is none of a file's, the second try ends the process as if nobody had looked. */
static void lose_page(int number, siginfo_t *info, void *context) {
    (void)context;
    K3Rank *r = watched;
    uint32_t none = 0;
    signal(number, SIG_DFL);
    if (k3_memory_lost(&r->memory, &r->image, info->si_addr, &r->lost) != 0) return;
    r->team.fault = loss(r);
    __atomic_compare_exchange_n(r->memory.abort_word, &none, r->image.header->rank + 1u, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    send_fault(r, &r->now, r->position[0]);
    _exit(4);
}

static int watch_pages(K3Rank *r) {
    struct sigaction action = {.sa_sigaction = lose_page, .sa_flags = SA_SIGINFO};
    watched = r;
    return sigaction(SIGBUS, &action, NULL);
}

/* A request that no driver of ours sends. `detail` is the token or span it is about. */
static int refuse(K3Rank *r, const K3Request *q, uint32_t detail) {
    const K3Request named = {.number = q->number};
    r->team.fault = (K3FaultReport){.code = K3_FAULT_REQUEST, .inst = K3_NO_INDEX, .opcode = 0xffff, .detail = detail};
    send_fault(r, &named, 0);
    return 4;
}

/* ---- a step ---------------------------------------------------------------------------------------- */

/* Whether the request's own fields are those of a step that this image runs. */
static int is_step(const K3Rank *r, const K3Request *q) {
    if (q->phase >= K3_N_PHASES || r->image.program[q->phase].n_entries == 0) return 0;
    if (q->n == 0 || q->n > r->image.program[q->phase].row.max_tokens) return 0;
    if (q->head_from > q->n || q->n_wanted > q->n - q->head_from) return 0;
    if (q->row == K3_NO_INDEX) return 1;
    const uint64_t n_rows = q->n - q->head_from;
    return r->memory.logits_file != NULL && q->row <= r->memory.logits_rows && n_rows <= r->memory.logits_rows - q->row;
}

/* Take the tokens. Returns K3_NO_INDEX, or the first that is out of range or does not follow its slot's last one of the step:
 * op bodies take positions and slots as they are. */
static uint32_t take_tokens(K3Rank *r, uint32_t n) {
    const K3ImageHeader *h = r->image.header;
    memset(r->next, 0xff, (size_t)h->n_slots * 4);
    for (uint32_t t = 0; t < n; t++) {
        const K3RequestToken *a = &r->asked[t];
        if (a->id >= h->vocab || a->slot >= h->n_slots || a->position >= h->max_context) return t;
        if (r->next[a->slot] != NOT_YET && r->next[a->slot] != a->position) return t;
        r->next[a->slot] = a->position + 1u;
        r->token_id[t] = a->id;
        r->position[t] = a->position;
        r->slot[t] = a->slot;
    }
    return K3_NO_INDEX;
}

/* This rank's columns of the rows it computed; on a fault they hold NaN like everything else. */
static void store_logits(const K3Rank *r, const K3Request *q) {
    const K3ImageHeader *h = r->image.header;
    const K3PhaseRow *row = &r->image.program[q->phase].row;
    const float *logits = r->memory.tensor[row->logits_handle];
    for (uint32_t t = q->head_from; t < q->n && q->row != K3_NO_INDEX; t++) {
        const uint64_t at = ((uint64_t)q->row + t - q->head_from) * h->vocab + (uint64_t)h->rank * row->logits_cols;
        memcpy(r->memory.logits_file + at, logits + (uint64_t)t * row->logits_cols, (size_t)row->logits_cols * 4);
    }
}

/* What was chosen after token t. Returns -1 for an id that no vocabulary has. */
static int choose(K3Rank *r, const K3Request *q, uint32_t t, K3Record *record) {
    const K3ImageHeader *h = r->image.header;
    const K3PhaseRow *row = &r->image.program[q->phase].row;
    const uint32_t *candidate = (const uint32_t *)r->memory.tensor[row->output_handle] + (uint64_t)t * K3_CANDIDATE_WORDS;
    const uint32_t *logits = (const uint32_t *)r->memory.tensor[row->logits_handle] + (uint64_t)t * row->logits_cols;
    record->kind = K3_RECORD_TOKEN;
    record->best = k3_bits_to_f32(candidate[0]);
    record->id = candidate[1];
    record->second = k3_bits_to_f32(candidate[2]);
    record->logits_digest = r->team.bodies->digest(logits, row->logits_cols, (uint64_t)h->rank * row->logits_cols);
    if (record->id < h->vocab) return 0;
    r->team.fault = (K3FaultReport){.code = K3_FAULT_RANGE, .phase = q->phase, .inst = K3_NO_INDEX, .opcode = 0xffff, .detail = record->id};
    return -1;
}

/* One record for each wanted token, or one that says the step is done. */
static int answer(K3Rank *r, const K3Request *q, K3Record record) {
    const uint32_t first = q->n_wanted > 0 ? q->n - q->n_wanted : q->n - 1;
    for (uint32_t t = first; t < q->n; t++) {
        record.position = r->position[t];
        record.slot = r->slot[t];
        if (q->n_wanted > 0 && choose(r, q, t, &record) != 0) {
            send_fault(r, q, r->position[t]);
            return 4;
        }
        k3_send_record(r, &record);
    }
    return 0;
}

static int run_step(K3Rank *r, const K3Request *q) {
    const K3ImageHeader *h = r->image.header;
    const K3Step step = {.n_tokens = q->n, .head_from = q->head_from, .epoch = r->epoch++, .max_pages = h->max_pages,
                         .token_id = r->token_id, .position = r->position, .slot = r->slot, .page_table = r->page_table};
    K3Record record = {.kind = K3_RECORD_PROMPT, .rank = h->rank, .step = q->number, .phase = q->phase, .n_tokens = q->n};
    const uint64_t start = k3_now_ns();
    uint32_t fault = k3_team_step(&r->team, q->phase, &step, &record.digest);
    record.ns = k3_now_ns() - start;
    store_logits(r, q);
    k3_memory_end_step(&r->memory, &r->image);
    if (fault != K3_FAULT_IO && k3_memory_check(&r->memory, &r->image, &r->lost) != 0) { /* whatever else was seen came of it */
        fault = K3_FAULT_IO;
        r->team.fault = loss(r);
    }
    if (fault != K3_FAULT_NONE) {
        send_fault(r, q, r->position[0]);
        return 4;
    }
    return answer(r, q, record);
}

static int serve_step(K3Rank *r, int fd, const K3Request *q) {
    if (!is_step(r, q)) return refuse(r, q, K3_NO_INDEX);
    if (read_all(fd, r->asked, q->n * sizeof *r->asked) != 1) return 1;
    const uint32_t bad = take_tokens(r, q->n);
    return bad != K3_NO_INDEX ? refuse(r, q, bad) : run_step(r, q);
}

/* ---- states ---------------------------------------------------------------------------------------- */

/* Whether a span lies in a tensor that only this rank has, and in the exchange file. */
static int is_span(const K3Rank *r, const K3RequestSpan *s, uint64_t exchange_bytes) {
    if (s->handle >= r->image.n_tensors || r->image.tensors[s->handle].place != K3_PLACE_PRIVATE) return 0;
    const uint64_t total = r->image.tensors[s->handle].bytes;
    return s->offset <= total && s->bytes <= total - s->offset && s->at <= exchange_bytes && s->bytes <= exchange_bytes - s->at;
}

/* The exchange file, as long as the driver has made it for this request. */
static char *map_exchange(const K3Rank *r, uint64_t *n_bytes) {
    struct stat st;
    const int fd = r->exchange == NULL ? -1 : open(r->exchange, O_RDWR | O_CLOEXEC);
    char *base = NULL;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size > 0) {
        *n_bytes = (uint64_t)st.st_size;
        base = mmap(NULL, (size_t)*n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (fd >= 0) close(fd);
    return base == MAP_FAILED ? NULL : base;
}

static int serve_state(K3Rank *r, int fd, const K3Request *q) {
    uint64_t n_bytes = 0;
    char *exchange = map_exchange(r, &n_bytes);
    if (exchange == NULL) return refuse(r, q, K3_NO_INDEX);
    for (uint32_t i = 0; i < q->n; i++) {
        K3RequestSpan s;
        if (read_all(fd, &s, sizeof s) != 1) return 1;
        if (!is_span(r, &s, n_bytes)) return refuse(r, q, i);
        char *own = (char *)r->memory.tensor[s.handle] + s.offset;
        if (q->kind == K3_REQUEST_SAVE) memcpy(exchange + s.at, own, s.bytes);
        else memcpy(own, exchange + s.at, s.bytes);
    }
    munmap(exchange, (size_t)n_bytes);
    const K3Record record = {.kind = K3_RECORD_DONE, .rank = r->image.header->rank, .step = q->number};
    k3_send_record(r, &record);
    return 0;
}

int k3_serve(K3Rank *r, int fd) {
    if (watch_pages(r) != 0) return 1;
    for (;;) {
        K3Request q;
        const int got = read_all(fd, &q, sizeof q);
        if (got <= 0) return got == 0 ? 0 : 1;
        r->now = q;
        const int rc = q.kind == K3_REQUEST_STEP ? serve_step(r, fd, &q)
                       : q.kind == K3_REQUEST_SAVE || q.kind == K3_REQUEST_RESTORE ? serve_state(r, fd, &q)
                                                                                   : refuse(r, &q, K3_NO_INDEX);
        if (rc != 0) return rc;
    }
}

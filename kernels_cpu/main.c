/* One rank: k3-cpu --image F --shared F --records FD [--logits F] [--trace F] [--copy 1] --threads N --leaves L --deadline S
 *
 * Reads the prompt in chunks, then decodes with the folded argmax, which is the same on every rank, so no rank
 * has to ask another what was chosen. Everything it says goes to descriptor FD as records, in words only to
 * stderr. With --from N the run begins at position N with noise in all states: what a token costs in a long
 * context, without reading one (its tokens mean nothing; only bench asks for it). With --copy 1 weights are read into
 * memory of their own first (copy.h). Also: --identity (isa hash, source
 * hash, leaves this CPU has), --handlers (opcodes by phase), --measure (measure.c), --measure-io (measure_io.c).
 * Exit: 0 done, 1 the driver is gone, 2 usage, 3 image refused, 4 stopped by a fault, 5 this machine is unfit.
 */
#define _GNU_SOURCE
#include "record.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "cpu.h"
#include "ftz.h"
#include "measure.h"
#include "proc.h"
#include "thread.h"

#ifndef K3_SOURCE_HASH
#error "the build defines K3_SOURCE_HASH"
#endif

typedef struct Options {
    const char *image, *shared, *logits, *trace, *leaves;
    uint32_t n_threads, from;
    int records, expert_trace, copies;
    double deadline_s;
} Options;

typedef struct Rank {
    K3Image image;
    K3Memory memory;
    K3Team team;
    uint32_t *token_id, *position, *slot, *page_table;
    uint32_t epoch, n_read, n_chosen;
    uint32_t from; /* position of the first token: 0 but for a measurement */
} Rank;

static int record_fd = -1;
static Rank rank; /* K3Team has aligned members, and one process is one rank */

/* ---- saying things --------------------------------------------------------------------------------- */

static int refuse(int code, const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    return code;
}

static void send_record(const K3Record *record) {
    if (write(record_fd, record, sizeof *record) != (ssize_t)sizeof *record) _exit(1);
}

/* ---- leaves ---------------------------------------------------------------------------------------- */

static int print_identity(void) {
    const K3Bodies *bodies;
    printf("{\"isa_hash\": \"%s\", \"source_hash\": \"%s\", \"image_version\": %u, \"leaves\": [", K3_ISA_HASH, K3_SOURCE_HASH, K3_IMAGE_VERSION);
    for (uint32_t i = 0; (bodies = k3_bodies_here(i)) != NULL; i++) printf("%s\"%s\"", i > 0 ? ", " : "", bodies->name);
    printf("]}\n");
    return 0;
}

static int print_handlers(void) {
    static const char *const PHASE[K3_N_PHASES] = {"decode", "prefill"};
    for (uint32_t p = 0; p < K3_N_PHASES; p++) {
        printf("%s", PHASE[p]);
        for (uint32_t op = 0; op < K3_N_OPCODES; op++)
            if (k3_bodies_scalar.op[p][op] != NULL) printf(" %u", op);
        printf("\n");
    }
    return 0;
}

/* ---- options --------------------------------------------------------------------------------------- */

static int parse(Options *o, int argc, char **argv) {
    *o = (Options){.leaves = "auto", .n_threads = 1, .records = -1, .expert_trace = -1, .deadline_s = 60};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--image") == 0) o->image = value;
        else if (strcmp(name, "--shared") == 0) o->shared = value;
        else if (strcmp(name, "--logits") == 0) o->logits = value;
        else if (strcmp(name, "--trace") == 0) o->trace = value;
        else if (strcmp(name, "--expert-trace") == 0) o->expert_trace = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--from") == 0) o->from = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--copy") == 0) o->copies = strcmp(value, "1") == 0;
        else if (strcmp(name, "--leaves") == 0) o->leaves = value;
        else if (strcmp(name, "--threads") == 0) o->n_threads = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--records") == 0) o->records = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--deadline") == 0) o->deadline_s = strtod(value, NULL);
        else return -1;
    }
    return argc % 2 == 1 && o->records >= 0 && o->image != NULL && o->shared != NULL && o->n_threads > 0 && o->n_threads <= 1024 && o->deadline_s > 0 ? 0 : -1;
}

/* ---- the run --------------------------------------------------------------------------------------- */

static int allocate(Rank *r) {
    const K3ImageHeader *h = r->image.header;
    uint32_t most = 1;
    for (uint32_t p = 0; p < K3_N_PHASES; p++)
        if (r->image.program[p].n_entries > 0 && r->image.program[p].row.max_tokens > most) most = r->image.program[p].row.max_tokens;
    r->token_id = calloc(most, 4);
    r->position = calloc(most, 4);
    r->slot = calloc(most, 4);
    r->page_table = calloc((size_t)h->n_slots * h->max_pages, 4);
    if (r->token_id == NULL || r->position == NULL || r->slot == NULL || r->page_table == NULL) return -1;
    for (uint32_t i = 0; i < h->n_slots * h->max_pages; i++) r->page_table[i] = i; /* every slot owns its pages */
    return 0;
}

static void send_fault(Rank *r, uint32_t phase) {
    K3Record record = {.kind = K3_RECORD_FAULT, .rank = r->image.header->rank, .step = r->n_chosen, .phase = phase,
                             .position = r->from + r->n_read, .fault = r->team.fault};
    if (r->memory.residency != NULL) record.io = r->memory.residency->io_fault;
    send_record(&record);
}

static void add_residency(K3Record *record, const K3Residency *r) {
    if (r == NULL) return;
    record->n_hits = r->n_hits;
    record->n_misses = r->n_misses;
    record->n_read_bytes = r->n_bytes;
    record->trace_error = r->trace_error;
    for (uint32_t i = 0; i < K3_MOST_DEVICES; i++) record->n_device_bytes[i] = r->devices.device[i].n_bytes;
}

static uint32_t is_direct(const K3Residency *r) {
    for (uint32_t i = 0; r != NULL && i < r->image->n_files; i++)
        if (r->files[i].fd >= 0 && !r->files[i].is_direct) return 0;
    return r != NULL;
}

/* This rank's columns of the rows it computed; on a fault they hold NaN like everything else. */
static void store_logits(const Rank *r, const K3PhaseRow *row, const K3Step *step, uint32_t first_row) {
    const K3ImageHeader *h = r->image.header;
    const float *logits = r->memory.tensor[row->logits_handle];
    if (r->memory.logits_file == NULL) return;
    for (uint32_t t = step->head_from; t < step->n_tokens; t++) {
        const uint64_t at = ((uint64_t)first_row + t) * h->vocab + (uint64_t)h->rank * row->logits_cols;
        memcpy(r->memory.logits_file + at, logits + (uint64_t)t * row->logits_cols, (size_t)row->logits_cols * 4);
    }
}

static void choose(Rank *r, const K3PhaseRow *row, const K3Step *step, K3Record *record) {
    const K3ImageHeader *h = r->image.header;
    const uint32_t last = step->n_tokens - 1;
    const uint32_t *candidate = (const uint32_t *)r->memory.tensor[row->output_handle] + (uint64_t)last * K3_CANDIDATE_WORDS;
    const uint32_t *logits = (const uint32_t *)r->memory.tensor[row->logits_handle] + (uint64_t)last * row->logits_cols;
    record->kind = K3_RECORD_TOKEN;
    record->best = k3_bits_to_f32(candidate[0]);
    record->id = candidate[1];
    record->second = k3_bits_to_f32(candidate[2]);
    record->logits_digest = r->team.bodies->digest(logits, row->logits_cols, (uint64_t)h->rank * row->logits_cols);
}

/* Run the tokens in r->token_id as one step. Returns 0, or -1 after a fault record. */
static int run_step(Rank *r, uint32_t phase, uint32_t n_tokens, int wants_token, K3Record *record) {
    const K3ImageHeader *h = r->image.header;
    const K3PhaseRow *row = &r->image.program[phase].row;
    for (uint32_t t = 0; t < n_tokens; t++) r->position[t] = r->from + r->n_read + t;
    const K3Step step = {.n_tokens = n_tokens, .head_from = h->all_logits ? 0 : wants_token ? n_tokens - 1 : n_tokens,
                         .epoch = r->epoch++, .max_pages = h->max_pages, .token_id = r->token_id, .position = r->position,
                         .slot = r->slot, .page_table = r->page_table};
    *record = (K3Record){.kind = K3_RECORD_PROMPT, .rank = h->rank, .step = r->n_chosen, .phase = phase,
                         .position = r->from + r->n_read + n_tokens - 1, .n_tokens = n_tokens};
    const uint64_t start = k3_now_ns();
    const uint32_t fault = k3_team_step(&r->team, phase, &step, &record->digest);
    record->ns = k3_now_ns() - start;
    store_logits(r, row, &step, r->n_read);
    k3_memory_end_step(&r->memory, &r->image);
    if (fault != K3_FAULT_NONE) {
        send_fault(r, phase);
        return -1;
    }
    if (wants_token) choose(r, row, &step, record);
    r->n_read += n_tokens;
    return 0;
}

static int is_stop(const Rank *r, uint32_t id) {
    for (uint32_t i = 0; i < r->image.n_stop; i++)
        if (r->image.stop[i] == id) return 1;
    return 0;
}

static int read_prompt(Rank *r, K3Record *record) {
    const K3Image *image = &r->image;
    const uint32_t chunk = image->header->chunk;
    while (r->n_read < image->n_prompt) {
        const uint32_t left = image->n_prompt - r->n_read, n = left < chunk ? left : chunk;
        memcpy(r->token_id, image->prompt + r->n_read, (size_t)n * 4);
        if (run_step(r, image->header->first_phase, n, n == left, record) != 0) return -1;
        if (n < left) send_record(record);
    }
    return 0;
}

static int generate(Rank *r) {
    K3Record record;
    if (read_prompt(r, &record) != 0) return 4;
    for (;;) {
        if (record.id >= r->image.header->vocab) {
            r->team.fault = (K3FaultReport){.code = K3_FAULT_RANGE, .inst = K3_NO_INDEX, .opcode = 0xffff, .detail = record.id};
            send_fault(r, record.phase);
            return 4;
        }
        r->n_chosen++;
        send_record(&record);
        if (r->n_chosen == r->image.header->n_gen || is_stop(r, record.id)) return 0;
        r->token_id[0] = record.id;
        if (run_step(r, 0, 1, 1, &record) != 0) return 4;
    }
}

/* Any numbers of moderate size do; zeros would let the memory of long states be one page. */
static void fill_states(const Rank *r) {
    uint32_t x = 1;
    for (uint32_t i = 0; i < r->image.n_tensors; i++) {
        const K3TensorRow *t = &r->image.tensors[i];
        float *values = r->memory.tensor[i];
        for (uint64_t k = 0; t->place == K3_PLACE_PRIVATE && k < t->bytes / 4; k++) {
            x = x * 1664525u + 1013904223u;
            values[k] = (float)(x >> 8) * 0x1p-24f - 0.5f;
        }
    }
}

static int begin_at(Rank *r, uint32_t from, char *why, size_t why_bytes) {
    const K3ImageHeader *h = r->image.header;
    r->from = from;
    if (from == 0) return 0;
    if ((uint64_t)from + r->image.n_prompt + h->n_gen - 1 > h->max_context) {
        snprintf(why, why_bytes, "position %u and tokens above the context %u", from, h->max_context);
        return -1;
    }
    fill_states(r);
    return 0;
}

static int start(Rank *r, const Options *o, const K3Bodies *bodies) {
    char why[512];
    if (k3_image_open(&r->image, o->image, why, sizeof why) != 0) return refuse(3, o->image, why);
    if (k3_memory_open(&r->memory, &r->image, o->shared, o->logits, o->copies, o->n_threads + r->image.header->n_load_queues + r->image.header->n_fetch_queues, why, sizeof why) != 0) return refuse(3, "weights", why);
    if (allocate(r) != 0) return refuse(5, "memory", "out of memory");
    if (k3_team_start(&r->team, &r->image, &r->memory, bodies, o->n_threads, (uint64_t)(o->deadline_s * 1e9), why, sizeof why) != 0)
        return refuse(5, "threads", why);
    if (o->trace != NULL && k3_trace_open(&r->team.trace, o->trace, o->n_threads, why, sizeof why) != 0) return refuse(5, "trace", why);
    if (o->expert_trace >= 0 && r->memory.residency != NULL) k3_residency_trace(r->memory.residency, o->expert_trace);
    if (begin_at(r, o->from, why, sizeof why) != 0) return refuse(2, "--from", why);
    const int canary = k3_canary_ftz();
    if (canary != 0) {
        snprintf(why, sizeof why, "canary %d of the arithmetic contract fails (see kernels_cpu/ftz.h)", canary);
        return refuse(5, "this CPU", why);
    }
    return 0;
}

int main(int argc, char **argv) {
    Options o;
    if (argc == 2 && strcmp(argv[1], "--identity") == 0) return print_identity();
    if (argc == 2 && strcmp(argv[1], "--handlers") == 0) return print_handlers();
    if (k3_first_stack() != 0) return refuse(5, "k3-cpu", "the stack limit is below 8 MiB; raise it: ulimit -s 8192");
    if (argc > 1 && strcmp(argv[1], "--measure-io") == 0) return k3_measure_io(argc - 2, argv + 2);
    if (argc > 1 && strcmp(argv[1], "--measure") == 0) return k3_measure(argc - 2, argv + 2);
    if (parse(&o, argc, argv) != 0) return refuse(2, "k3-cpu", "need --image F --shared F --records FD [--logits F] [--trace F] [--expert-trace FD] [--from N] [--copy 1] [--threads N] [--leaves L] [--deadline S]");
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* no stray rank after a killed driver; one that died before: the pipe says so */
    record_fd = o.records;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* the driver decides */
    const K3Bodies *bodies = k3_choose_bodies(o.leaves);
    if (bodies == NULL) return refuse(5, o.leaves, "this CPU does not have these leaves");
    const int code = start(&rank, &o, bodies);
    if (code != 0) return code;
    K3Record record = {.kind = K3_RECORD_READY, .rank = rank.image.header->rank, .n_tokens = o.n_threads};
    record.is_direct = is_direct(rank.memory.residency);
    snprintf(record.name, sizeof record.name, "%s", bodies->name);
    send_record(&record);
    const int rc = generate(&rank);
    k3_team_stop(&rank.team);
    if (rc == 0) {
        record = (K3Record){.kind = K3_RECORD_END, .rank = rank.image.header->rank, .step = rank.n_chosen, .peak_bytes = k3_proc_bytes("/proc/self/status", "VmHWM:")};
        add_residency(&record, rank.memory.residency);
        send_record(&record);
    }
    return rc;
}

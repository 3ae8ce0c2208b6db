/* One rank: k3-cpu --image F --shared F --requests FD --records FD [--logits F] [--trace F] --threads N --leaves L --deadline S
 *
 * Maps its memory, says so, and runs the steps that it is asked for on descriptor --requests until that is closed (steps.h).
 * Everything it says goes to --records as records, in words only to stderr. --exchange names the file through which states of
 * slots come and go. With --noise 1 all states begin with noise: what a token costs in a long context, without reading one
 * (its tokens mean nothing; only bench asks for it). With --copy 1 weights are read into memory of their own first (copy.h).
 * Also: --identity (isa hash, source hash, leaves this CPU has), --handlers (opcodes by phase), --measure (measure.c),
 * --measure-io (measure_io.c).
 * Exit: 0 done, 1 the driver is gone, 2 usage, 3 image refused, 4 stopped by a fault, 5 this machine is unfit.
 */
#define _GNU_SOURCE
#include "steps.h"

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
    const char *image, *shared, *logits, *trace, *exchange, *leaves;
    uint32_t n_threads;
    int requests, records, expert_trace, copies, noise;
    int hash_table, hashes, kept; /* hashes.h */
    double deadline_s;
} Options;

static K3Rank rank; /* K3Team has aligned members, and one process is one rank */

/* ---- saying things --------------------------------------------------------------------------------- */

static int refuse(int code, const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    return code;
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
    *o = (Options){.leaves = "auto", .n_threads = 1, .requests = -1, .records = -1, .expert_trace = -1, .hash_table = -1, .hashes = -1, .kept = -1, .deadline_s = 60};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--image") == 0) o->image = value;
        else if (strcmp(name, "--shared") == 0) o->shared = value;
        else if (strcmp(name, "--logits") == 0) o->logits = value;
        else if (strcmp(name, "--trace") == 0) o->trace = value;
        else if (strcmp(name, "--expert-trace") == 0) o->expert_trace = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--exchange") == 0) o->exchange = value;
        else if (strcmp(name, "--hash-table") == 0) o->hash_table = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--hashes") == 0) o->hashes = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--kept") == 0) o->kept = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--noise") == 0) o->noise = strcmp(value, "1") == 0;
        else if (strcmp(name, "--copy") == 0) o->copies = strcmp(value, "1") == 0;
        else if (strcmp(name, "--leaves") == 0) o->leaves = value;
        else if (strcmp(name, "--threads") == 0) o->n_threads = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--requests") == 0) o->requests = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--records") == 0) o->records = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--deadline") == 0) o->deadline_s = strtod(value, NULL);
        else return -1;
    }
    return argc % 2 == 1 && o->requests >= 0 && o->records >= 0 && o->image != NULL && o->shared != NULL && o->n_threads > 0 && o->n_threads <= 1024 && o->deadline_s > 0 ? 0 : -1;
}

/* ---- the start ------------------------------------------------------------------------------------- */

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

/* Any numbers of moderate size do; zeros would let the memory of long states be one page. */
static void fill_states(const K3Rank *r) {
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

static int start(K3Rank *r, const Options *o, const K3Bodies *bodies) {
    char why[512];
    if (k3_image_open(&r->image, o->image, why, sizeof why) != 0) return refuse(3, o->image, why);
    if (k3_memory_open(&r->memory, &r->image, o->shared, o->logits, o->copies, o->n_threads + r->image.header->n_load_queues + r->image.header->n_fetch_queues, why, sizeof why) != 0) return refuse(3, "weights", why);
    if (k3_steps_open(r) != 0) return refuse(5, "memory", "out of memory");
    if (k3_team_start(&r->team, &r->image, &r->memory, bodies, o->n_threads, (uint64_t)(o->deadline_s * 1e9), why, sizeof why) != 0)
        return refuse(5, "threads", why);
    if (o->trace != NULL && k3_trace_open(&r->team.trace, o->trace, o->n_threads, why, sizeof why) != 0) return refuse(5, "trace", why);
    if (o->hash_table >= 0 && k3_hashes_open(&r->team.hashes, &r->image, o->hash_table, o->hashes, o->kept, why, sizeof why) != 0)
        return refuse(3, "--hash-table", why);
    if (o->expert_trace >= 0 && r->memory.residency != NULL) k3_residency_trace(r->memory.residency, o->expert_trace);
    if (o->noise) fill_states(r);
    r->record_fd = o->records;
    r->exchange = o->exchange;
    const int canary = k3_canary_ftz();
    if (canary != 0) {
        snprintf(why, sizeof why, "canary %d of the arithmetic contract fails (see kernels_cpu/ftz.h)", canary);
        return refuse(5, "this CPU", why);
    }
    return 0;
}

/* From the first record to the last. */
static int serve(const Options *o, const char *leaves) {
    K3Record record = {.kind = K3_RECORD_READY, .rank = rank.image.header->rank, .n_tokens = o->n_threads};
    record.is_direct = is_direct(rank.memory.residency);
    snprintf(record.name, sizeof record.name, "%s", leaves);
    k3_send_record(&rank, &record);
    const int rc = k3_serve(&rank, o->requests);
    k3_team_stop(&rank.team);
    if (rc != 0) return rc;
    record = (K3Record){.kind = K3_RECORD_END, .rank = rank.image.header->rank, .peak_bytes = k3_proc_bytes("/proc/self/status", "VmHWM:")};
    add_residency(&record, rank.memory.residency);
    k3_send_record(&rank, &record);
    return 0;
}

int main(int argc, char **argv) {
    Options o;
    if (argc == 2 && strcmp(argv[1], "--identity") == 0) return print_identity();
    if (argc == 2 && strcmp(argv[1], "--handlers") == 0) return print_handlers();
    if (k3_first_stack() != 0) return refuse(5, "k3-cpu", "the stack limit is below 8 MiB; raise it: ulimit -s 8192");
    if (argc > 1 && strcmp(argv[1], "--measure-io") == 0) return k3_measure_io(argc - 2, argv + 2);
    if (argc > 1 && strcmp(argv[1], "--measure") == 0) return k3_measure(argc - 2, argv + 2);
    if (parse(&o, argc, argv) != 0) return refuse(2, "k3-cpu", "need --image F --shared F --requests FD --records FD [--logits F] [--exchange F] [--trace F] [--expert-trace FD] [--hash-table FD --hashes FD [--kept FD]] [--noise 1] [--copy 1] [--threads N] [--leaves L] [--deadline S]");
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* no stray rank after a killed driver; one that died before: the pipe says so */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* the driver decides, also where a supervisor sends its signal to the whole group */
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    const K3Bodies *bodies = k3_choose_bodies(o.leaves);
    if (bodies == NULL) return refuse(5, o.leaves, "this CPU does not have these leaves");
    const int code = start(&rank, &o, bodies);
    if (code != 0) return code;
    return serve(&o, bodies->name);
}

/* `k3-cpu --measure --threads N --bytes B`: one matrix product or one pass of reading per line of stdin.
 *
 *   read STREAMS AHEAD                  STREAMS 1 or 4, AHEAD 0 or 1 (software prefetch)
 *   fma                                 fused multiply-adds of the quickest set, in registers
 *   pairs SET                           the same by products of bf16 pairs; "none" where the set's leaves use none
 *   barrier ROUNDS                      all threads meet so many times, by one counter and one word that they watch
 *   gemv SET KIND MODE K BLOCKS         SET a leaf set or "double"; KIND bf16 or mxfp4; MODE f32 or bf16
 *   check SET KIND MODE K BLOCKS        the same on the first rows, against the scalar leaves
 *
 * The first line on stdout is "ready THREADS BYTES HUGE_BYTES SET" (memory, how much of it lies in huge pages, the
 * quickest set). Answers: "SECONDS BYTES", for fma and pairs "SECONDS FUSED", for barrier "SECONDS ROUNDS", for check the number of values that differ, or "error WHY".
 *
 * All commands walk the same memory, each thread its own contiguous part, so that only the work differs. Between
 * commands all threads sleep: another process may be measured meanwhile. Outputs go to a tile that stays in cache,
 * as op bodies do it; a product is called by K3_MEASURE_ROWS rows, the least that an op body calls. */
#define _GNU_SOURCE
#include "measure.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu.h"
#include "ftz.h"
#include "huge.h"
#include "leaves/select.h"
#include "proc.h"
#include "thread.h"

#define K3_MEASURE_ROWS 64u
#define K3_MEASURE_ROUNDS 4000000u /* of fma: some 15 ms */
#define K3_MEASURE_MAX_K 65536u
#define K3_MEASURE_MAX_THREADS 1024u
#define K3_MEASURE_MAX_ROUNDS 4000000u
#define K3_MEASURE_PAUSES 300u /* before a thread gives its core away: a core for each may not be there */

typedef struct Job {
    const K3Bodies *set; /* 0: the peer's order */
    const K3MeasureLoops *loops;
    uint32_t rounds; /* of a barrier, else 0 */
    int is_read, is_fma, is_pairs, ahead, is_mxfp4, is_rounded;
    uint32_t n_streams, K, n_blocks;
} Job;

typedef struct Bench Bench;

typedef struct Thread {
    Bench *bench;
    uint32_t index;
    pthread_t id;
    uint64_t bytes, sink;
} Thread;

struct Bench {
    char *data;
    uint8_t *scales;
    float *x[2]; /* any values; values that bf16 represents */
    double *x_wide;
    uint64_t bytes;
    uint32_t n_threads;
    cpu_set_t cpus;
    Job job;
    Thread thread[K3_MEASURE_MAX_THREADS];
    pthread_barrier_t start, end;
    _Alignas(64) uint32_t arrived;
    _Alignas(64) uint32_t met;
};

/* ---- one thread's part ------------------------------------------------------------------------------ */

static void call_tile(const Bench *b, const Job *j, uint64_t row, uint32_t n, float *y) {
    const uint16_t *w = (const uint16_t *)(const void *)b->data + row * j->K;
    const uint8_t *packed = (const uint8_t *)b->data + row * (j->K / 2u), *scale = b->scales + row * (j->K / K3_MX_GROUP);
    const float *x = b->x[j->is_rounded];
    if (j->set == NULL) {
        if (j->is_mxfp4) j->loops->peer_mxfp4(packed, scale, n, j->K, b->x_wide, y);
        else j->loops->peer_bf16(w, n, j->K, b->x_wide, y);
    } else if (!j->is_mxfp4) {
        j->set->leaf.rows_bf16[j->is_rounded](0, w, j->K, 0, n, j->K, j->n_blocks, x, j->K, 1, y, n);
    } else if (j->n_blocks > 1u) { /* as the combine of experts wants them: blocks, no tree */
        j->set->leaf.blocks_mxfp4[j->is_rounded](0, packed, scale, 0, n, j->K, j->n_blocks, x, y);
    } else {
        j->set->leaf.rows_mxfp4[j->is_rounded](0, packed, scale, 0, n, j->K, 1, x, j->K, 1, y, n);
    }
}

static uint64_t row_bytes(const Job *j) { return j->is_mxfp4 ? j->K / 2u + j->K / K3_MX_GROUP : 2u * (uint64_t)j->K; }

/* Whole tiles of this thread. Returns the bytes of weights it walked. */
static uint64_t run_rows(const Bench *b, const Job *j, uint32_t thread, uint64_t *sink) {
    float y[K3_MEASURE_ROWS * 8];
    const uint64_t per_row = j->is_mxfp4 ? j->K / 2u : 2u * (uint64_t)j->K;
    const uint64_t n = b->bytes / per_row / b->n_threads / K3_MEASURE_ROWS * K3_MEASURE_ROWS;
    for (uint64_t r = thread * n; r < (thread + 1u) * n; r += K3_MEASURE_ROWS) {
        call_tile(b, j, r, K3_MEASURE_ROWS, y);
        *sink += k3_f32_to_bits(y[0]);
    }
    return n * row_bytes(j);
}

/* The last to arrive begins the next round. Returns the rounds of thread 0, so that the sum is theirs. */
static uint64_t meet(Bench *b, uint32_t thread) {
    for (uint32_t round = 0; round < b->job.rounds; round++) {
        if (__atomic_add_fetch(&b->arrived, 1u, __ATOMIC_ACQ_REL) == b->n_threads) {
            __atomic_store_n(&b->arrived, 0u, __ATOMIC_RELAXED);
            __atomic_store_n(&b->met, round + 1u, __ATOMIC_RELEASE);
        }
        for (uint32_t idle = 0; __atomic_load_n(&b->met, __ATOMIC_ACQUIRE) == round; idle++) {
            if (idle < K3_MEASURE_PAUSES) __builtin_ia32_pause();
            else sched_yield();
        }
    }
    return thread == 0 ? b->job.rounds : 0;
}

static void run_part(Thread *t) {
    Bench *b = t->bench;
    const uint64_t part = b->bytes / b->n_threads / 4096u * 4096u;
    t->bytes = part;
    if (b->job.rounds > 0) t->bytes = meet(b, t->index);
    else if (b->job.is_fma || b->job.is_pairs) {
        float sum = 0.0f;
        t->bytes = (b->job.is_pairs ? b->job.set->pairs : b->job.loops->fma)(K3_MEASURE_ROUNDS, &sum);
        t->sink += k3_f32_to_bits(sum);
    } else if (b->job.is_read) t->sink += b->job.loops->read(b->data + t->index * part, part, b->job.n_streams, b->job.ahead);
    else t->bytes = run_rows(b, &b->job, t->index, &t->sink);
}

/* ---- threads ----------------------------------------------------------------------------------------- */

static void pin(const Bench *b, uint32_t index) {
    const int n = CPU_COUNT(&b->cpus);
    int seen = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &b->cpus) && seen++ == (int)index % n) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one); /* refused: it runs where it may */
            return;
        }
}

static void *serve(void *argument) {
    Thread *t = argument;
    pin(t->bench, t->index);
    k3_set_ftz();
    for (;;) {
        pthread_barrier_wait(&t->bench->start);
        run_part(t);
        pthread_barrier_wait(&t->bench->end);
    }
    return NULL;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double run_all(Bench *b, uint64_t *bytes) {
    const double start = now();
    pthread_barrier_wait(&b->start);
    run_part(&b->thread[0]);
    pthread_barrier_wait(&b->end);
    const double seconds = now() - start;
    *bytes = 0;
    for (uint32_t i = 0; i < b->n_threads; i++) *bytes += b->thread[i].bytes;
    return seconds;
}

/* ---- memory ------------------------------------------------------------------------------------------ */

/* Weights that are finite and of like size as bf16, and legal as MXFP4; scales of sixteen values. */
static void fill(Bench *b) {
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < b->bytes / 8u; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((uint64_t *)(void *)b->data)[i] = (state & 0x80ff80ff80ff80ffu) | 0x3d003d003d003d00u;
    }
    for (uint64_t i = 0; i < b->bytes / 16u; i++) b->scales[i] = (uint8_t)(112u + (i * 7u) % 16u);
    for (uint32_t i = 0; i < K3_MEASURE_MAX_K; i++) {
        const float x = (float)((int)(i * 40503u % 2003u) - 1001) / 1001.0f;
        b->x[0][i] = x;
        b->x[1][i] = k3_bf16_to_f32(k3_f32_to_bf16(x));
        b->x_wide[i] = (double)x;
    }
}

static int open_bench(Bench *b) {
    b->data = k3_huge_alloc(b->bytes);
    b->scales = k3_huge_alloc(b->bytes / 16u);
    b->x[0] = k3_huge_alloc(K3_MEASURE_MAX_K * sizeof(float));
    b->x[1] = k3_huge_alloc(K3_MEASURE_MAX_K * sizeof(float));
    b->x_wide = k3_huge_alloc(K3_MEASURE_MAX_K * sizeof(double));
    if (b->data == NULL || b->scales == NULL || b->x[0] == NULL || b->x[1] == NULL || b->x_wide == NULL) return -1;
    fill(b);
    if (sched_getaffinity(0, sizeof b->cpus, &b->cpus) != 0) CPU_SET(0, &b->cpus);
    if (pthread_barrier_init(&b->start, NULL, b->n_threads) != 0 || pthread_barrier_init(&b->end, NULL, b->n_threads) != 0) return -1;
    for (uint32_t i = 0; i < b->n_threads; i++) b->thread[i] = (Thread){.bench = b, .index = i};
    for (uint32_t i = 1; i < b->n_threads; i++)
        if (k3_thread_start(&b->thread[i].id, serve, &b->thread[i]) != 0) return -1;
    pin(b, 0);
    k3_set_ftz();
    return 0;
}

/* ---- commands ---------------------------------------------------------------------------------------- */

static const K3MeasureLoops *loops_of(const char *set) {
    if (strncmp(set, "avx512", 6) == 0) return &k3_measure_avx512;
    return strcmp(set, "avx2") == 0 ? &k3_measure_avx2 : &k3_measure_plain;
}

/* Reads the arguments of gemv and check; returns 0 where they make no product. */
static int parse_product(Job *job, const char *line) {
    char set[32], kind[8], mode[8];
    *job = (Job){.loops = loops_of(k3_bodies_here(0)->name)};
    if (sscanf(line, "%*s %31s %7s %7s %u %u", set, kind, mode, &job->K, &job->n_blocks) != 5) return 0;
    const int is_peer = strcmp(set, "double") == 0;
    job->set = is_peer ? NULL : k3_choose_bodies(set);
    job->is_mxfp4 = strcmp(kind, "mxfp4") == 0;
    job->is_rounded = strcmp(mode, "bf16") == 0;
    if (!is_peer && job->set == NULL) return 0;
    if ((!job->is_mxfp4 && strcmp(kind, "bf16") != 0) || (!job->is_rounded && strcmp(mode, "f32") != 0)) return 0;
    if (job->K == 0 || job->K > K3_MEASURE_MAX_K || job->K % 32u != 0) return 0;
    return job->n_blocks == 1u || (job->n_blocks == 8u && job->K % 16u == 0);
}

/* Values of the first tile that are not what the scalar leaves make of the same operands: other bits, for the peer
 * (which sums in another order) more than 1e-4 of the largest value. */
static uint32_t check(const Bench *b, const Job *job) {
    float got[K3_MEASURE_ROWS * 8], want[K3_MEASURE_ROWS * 8], largest = 0;
    const uint32_t n = K3_MEASURE_ROWS * (job->is_mxfp4 && job->set != NULL ? job->n_blocks : 1u);
    Job scalar = *job;
    uint32_t wrong = 0;
    scalar.set = k3_choose_bodies("scalar");
    scalar.n_blocks = job->set == NULL ? 1u : job->n_blocks;
    call_tile(b, job, 0, K3_MEASURE_ROWS, got);
    call_tile(b, &scalar, 0, K3_MEASURE_ROWS, want);
    for (uint32_t i = 0; i < n; i++) largest = __builtin_fmaxf(largest, __builtin_fabsf(want[i]));
    for (uint32_t i = 0; i < n; i++)
        wrong += job->set != NULL ? k3_f32_to_bits(got[i]) != k3_f32_to_bits(want[i]) : !(__builtin_fabsf(got[i] - want[i]) <= 1e-4f * largest);
    return wrong;
}

/* Reads the argument of pairs; returns 0 where it names no set. */
static int parse_pairs(Job *job, const char *line) {
    char set[32];
    if (sscanf(line, "pairs %31s", set) != 1 || (job->set = k3_choose_bodies(set)) == NULL) return 0;
    return job->is_pairs = 1;
}

/* Reads the argument of barrier; returns 0 where it is none. Nobody runs: the last round's mark can be taken back. */
static int parse_barrier(Bench *b, const char *line) {
    b->met = 0;
    return sscanf(line, "barrier %u", &b->job.rounds) == 1 && b->job.rounds > 0 && b->job.rounds <= K3_MEASURE_MAX_ROUNDS;
}

static void answer(Bench *b, const char *line) {
    uint64_t bytes;
    Job *job = &b->job;
    *job = (Job){.is_read = 1, .loops = loops_of(k3_bodies_here(0)->name)};
    const int is_read = sscanf(line, "read %u %d", &job->n_streams, &job->ahead) == 2 && (job->n_streams == 1u || job->n_streams == 4u);
    job->is_fma = strcmp(line, "fma") == 0;
    if (!is_read && !job->is_fma && !parse_barrier(b, line) && !parse_pairs(job, line) && !parse_product(job, line)) {
        printf("error not a command: %s\n", line);
    } else if (job->is_pairs && job->set->pairs == NULL) {
        printf("none\n");
    } else if (strncmp(line, "check", 5) == 0) {
        printf("%u\n", check(b, job));
    } else {
        const double seconds = run_all(b, &bytes);
        printf("%.9f %llu\n", seconds, (unsigned long long)bytes);
    }
    fflush(stdout);
}

int k3_measure(int argc, char **argv) {
    static Bench bench;
    char line[256];
    unsigned long long bytes = 0;
    for (int i = 0; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--threads") == 0) bench.n_threads = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--bytes") == 0) bytes = strtoull(argv[i + 1], NULL, 10);
    }
    bench.bytes = bytes / 4096u * 4096u;
    if (bench.n_threads == 0 || bench.n_threads > K3_MEASURE_MAX_THREADS || bench.bytes / bench.n_threads < ((uint64_t)16 << 20)) {
        fprintf(stderr, "k3-cpu --measure: need --threads N --bytes B, 1 to %u threads and 16 MiB for each\n", K3_MEASURE_MAX_THREADS);
        return 2;
    }
    if (open_bench(&bench) != 0) {
        fprintf(stderr, "k3-cpu --measure: memory or threads: got none for %llu bytes and %u threads\n", bytes, bench.n_threads);
        return 5;
    }
    const unsigned long long huge = k3_proc_bytes("/proc/self/smaps_rollup", "AnonHugePages:");
    printf("ready %u %llu %llu %s\n", bench.n_threads, (unsigned long long)bench.bytes, huge, k3_bodies_here(0)->name);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = 0;
        answer(&bench, line);
    }
    return 0;
}

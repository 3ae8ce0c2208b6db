/* A file that is in the page cache is copied from there; of another the pages go around it (O_DIRECT), so that memory
 * holds them once. Blocks are whole pages, so two threads never write the same one. */
#define _GNU_SOURCE
#include "copy.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "huge.h"
#include "io.h"

#define BLOCK ((uint64_t)4 << 20)
#define LEAST_THREADS 4u /* a device wants several reads at a time even where there is one core */
#define MOST_THREADS 64u

typedef struct Range { /* whole pages of one file */
    uint32_t file;
    uint64_t first, end;
} Range;

typedef struct Copy {
    const K3Image *image;
    const char **copy;
    K3IoFile *files;
    Range *ranges; /* sorted, apart from each other */
    uint64_t n_ranges;
    uint64_t next; /* block over all ranges, taken by whoever is free */
    uint64_t *first_block; /* of each range */
    uint32_t *progress;
    uint32_t failed;
    K3IoFault fault;
} Copy;

int k3_is_row_table(const K3Image *image, uint32_t handle) {
    for (uint32_t p = 0; p < K3_N_PHASES; p++)
        for (uint32_t i = 0; i < image->program[p].n_insts; i++) {
            const K3Inst *inst = &image->program[p].insts[i];
            if (inst->op == K3_OP_EMBED_BF16 && inst->handle[K3_EMBED_BF16_TABLE] == handle) return 1;
        }
    return 0;
}

/* ---- what is to be read ------------------------------------------------------------------------------ */

static void add_range(Copy *c, uint32_t file, uint64_t offset, uint64_t bytes) {
    if (bytes > 0) c->ranges[c->n_ranges++] = (Range){file, k3_io_down(offset), k3_io_up(offset + bytes)};
}

static int by_place(const void *left, const void *right) {
    const Range *a = left, *b = right;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return a->first < b->first ? -1 : a->first > b->first;
}

/* Ranges that touch become one; then blocks are counted through. Returns their number. */
static uint64_t join_ranges(Copy *c) {
    uint64_t n = 0, blocks = 0;
    qsort(c->ranges, c->n_ranges, sizeof *c->ranges, by_place);
    for (uint64_t i = 0; i < c->n_ranges; i++) {
        const Range *r = &c->ranges[i];
        if (n > 0 && c->ranges[n - 1].file == r->file && r->first <= c->ranges[n - 1].end) {
            if (r->end > c->ranges[n - 1].end) c->ranges[n - 1].end = r->end;
        } else c->ranges[n++] = *r;
    }
    c->n_ranges = n;
    for (uint64_t i = 0; i < n; i++) {
        c->first_block[i] = blocks;
        blocks += (c->ranges[i].end - c->ranges[i].first + BLOCK - 1) / BLOCK;
    }
    return blocks;
}

static int list_ranges(Copy *c) {
    const K3Image *m = c->image;
    const uint64_t most = m->n_tensors + 2 * (uint64_t)m->n_experts + 1;
    c->ranges = malloc(most * sizeof *c->ranges);
    c->first_block = malloc(most * sizeof *c->first_block);
    if (c->ranges == NULL || c->first_block == NULL) return -1;
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        const K3TensorRow *t = &m->tensors[i];
        if (t->place == K3_PLACE_FILE && !k3_is_row_table(m, i)) add_range(c, t->file, t->offset, t->bytes);
        for (uint32_t e = t->expert0; t->place == K3_PLACE_EXPERTS && e < t->expert0 + t->n_experts; e++) {
            add_range(c, m->experts[e].packed_file, m->experts[e].packed_offset, t->packed_bytes);
            add_range(c, m->experts[e].scale_file, m->experts[e].scale_offset, t->scale_bytes);
        }
    }
    return 0;
}

/* ---- where it comes from and goes to ----------------------------------------------------------------- */

/* Whether most of a file's pages are in the page cache; "no" where the system does not say. */
static int is_cached(int fd, uint64_t bytes) {
    const uint64_t n_pages = k3_io_up(bytes) / K3_IO_PAGE;
    unsigned char *in_memory = malloc(n_pages);
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    uint64_t n = 0;
    if (in_memory != NULL && map != MAP_FAILED && mincore(map, bytes, in_memory) == 0)
        for (uint64_t i = 0; i < n_pages; i++) n += in_memory[i] & 1u;
    if (map != MAP_FAILED) munmap(map, bytes);
    free(in_memory);
    return 2 * n > n_pages;
}

static int open_file(Copy *c, uint32_t file, char *why, size_t why_bytes) {
    K3IoFile *f = &c->files[file];
    const char *path = c->image->text + c->image->files[file].path_offset;
    if (k3_io_open(f, path, c->image->files[file].bytes, why, why_bytes) != 0) return -1;
    if (f->is_direct && is_cached(f->fd, f->bytes)) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) { /* else the direct way serves too */
            close(f->fd);
            f->fd = fd;
            f->is_direct = 0;
        }
    }
    f->is_kept = 1;
    c->copy[file] = k3_huge_alloc(k3_io_up(f->bytes));
    if (c->copy[file] != NULL) return 0;
    snprintf(why, why_bytes, "memory for %llu bytes of weights: %s", (unsigned long long)f->bytes, strerror(errno));
    return -1;
}

static int open_files(Copy *c, char *why, size_t why_bytes) {
    for (uint32_t i = 0; i < c->image->n_files; i++) c->files[i].fd = -1;
    for (uint64_t i = 0; i < c->n_ranges; i++)
        if (c->files[c->ranges[i].file].fd < 0 && open_file(c, c->ranges[i].file, why, why_bytes) != 0) return -1;
    return 0;
}

/* ---- reading ----------------------------------------------------------------------------------------- */

static const Range *range_of(const Copy *c, uint64_t block) {
    uint64_t low = 0, high = c->n_ranges;
    while (high - low > 1) {
        const uint64_t mid = (low + high) / 2;
        if (c->first_block[mid] <= block) low = mid;
        else high = mid;
    }
    return &c->ranges[low];
}

static void read_block(Copy *c, uint64_t block) {
    const Range *r = range_of(c, block);
    const K3IoFile *file = &c->files[r->file];
    const uint64_t at = r->first + (block - c->first_block[r - c->ranges]) * BLOCK;
    const uint64_t most = r->end < file->bytes ? r->end : file->bytes, end = at + BLOCK < most ? at + BLOCK : most;
    K3IoFault fault;
    if (k3_io_read(file, at, end - at, (char *)(uintptr_t)c->copy[r->file] + at, &fault) == 0) {
        __atomic_fetch_add(c->progress, 1u, __ATOMIC_RELAXED);
        return;
    }
    if (__atomic_exchange_n(&c->failed, 1u, __ATOMIC_ACQ_REL) != 0) return;
    c->fault = fault;
    c->fault.file = r->file;
}

typedef struct Reader {
    Copy *copy;
    uint64_t n_blocks;
} Reader;

static void *reader_main(void *argument) {
    const Reader *reader = argument;
    Copy *c = reader->copy;
    uint64_t block;
    while (__atomic_load_n(&c->failed, __ATOMIC_ACQUIRE) == 0 && (block = __atomic_fetch_add(&c->next, 1u, __ATOMIC_RELAXED)) < reader->n_blocks)
        read_block(c, block);
    return NULL;
}

static void read_blocks(Copy *c, uint64_t n_blocks, uint32_t n_threads) {
    Reader reader = {c, n_blocks};
    pthread_t thread[MOST_THREADS];
    uint32_t n = 0;
    const uint32_t most = n_threads < LEAST_THREADS ? LEAST_THREADS : n_threads < MOST_THREADS ? n_threads : MOST_THREADS;
    while (n + 1u < most && pthread_create(&thread[n], NULL, reader_main, &reader) == 0) n++;
    reader_main(&reader);
    for (uint32_t i = 0; i < n; i++) pthread_join(thread[i], NULL);
}

int k3_copy_weights(const K3Image *image, const char **copy, uint32_t n_threads, uint32_t *progress, char *why, size_t why_bytes) {
    Copy c = {.image = image, .copy = copy, .progress = progress};
    int rc = -1;
    c.files = calloc(image->n_files + 1u, sizeof *c.files);
    if (c.files == NULL || list_ranges(&c) != 0) snprintf(why, why_bytes, "out of memory");
    else {
        const uint64_t n_blocks = join_ranges(&c);
        rc = open_files(&c, why, why_bytes);
        if (rc == 0) read_blocks(&c, n_blocks, n_threads);
        if (c.failed) {
            k3_io_words(&c.fault, image->text + image->files[c.fault.file].path_offset, why, why_bytes);
            rc = -1;
        }
        for (uint32_t i = 0; i < image->n_files; i++)
            if (c.files[i].fd >= 0) close(c.files[i].fd);
    }
    free(c.files);
    free(c.ranges);
    free(c.first_block);
    return rc;
}

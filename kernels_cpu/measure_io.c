/* k3-cpu --measure-io FILE BLOCK_BYTES THREADS BYTES: how fast whole blocks of a file come, read as weights are.
 *
 * Blocks are read once each, in an order that jumps through the file like a router's choice, until BYTES have come or the
 * file is over. Prints `bytes ns direct`: direct 0 where the file system only reads through the page cache, so that the
 * number may be memory's. */
#define _GNU_SOURCE
#include "measure.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "huge.h"
#include "interp.h"
#include "io.h"

typedef struct IoMeasure {
    K3IoFile file;
    uint64_t block, n_blocks, stride, next, most;
    uint32_t fault;
    K3IoFault what;
} IoMeasure;

static void *reader_main(void *argument) {
    IoMeasure *m = argument;
    const uint64_t least = 2 * K3_HUGE_PAGE, need = k3_io_up(m->block) + K3_IO_PAGE, room = need > least ? need : least;
    char *pages = k3_huge_alloc(room); /* as a run has them: a direct read into small pages is slower */
    K3IoFault fault;
    uint64_t i;
    if (pages == NULL) {
        __atomic_store_n(&m->fault, 1u, __ATOMIC_RELAXED);
        return NULL;
    }
    while ((i = __atomic_fetch_add(&m->next, 1u, __ATOMIC_RELAXED)) < m->most && __atomic_load_n(&m->fault, __ATOMIC_RELAXED) == 0)
        if (k3_io_read(&m->file, i * m->stride % m->n_blocks * m->block, m->block, pages, &fault) != 0) {
            m->what = fault;
            __atomic_store_n(&m->fault, 1u, __ATOMIC_RELAXED);
        }
    munmap(pages, room);
    return NULL;
}

static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b != 0) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

int k3_measure_io(int argc, char **argv) {
    IoMeasure m = {0};
    struct stat st;
    char why[512];
    pthread_t thread[K3_MOST_IO_QUEUES];
    const uint32_t n_threads = argc == 4 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    if (argc != 4 || (m.block = strtoull(argv[1], NULL, 10)) == 0 || n_threads == 0 || n_threads > K3_MOST_IO_QUEUES) {
        fprintf(stderr, "k3-cpu --measure-io: need FILE BLOCK_BYTES THREADS BYTES\n");
        return 2;
    }
    if (stat(argv[0], &st) != 0 || k3_io_open(&m.file, argv[0], (uint64_t)st.st_size, why, sizeof why) != 0) {
        fprintf(stderr, "%s: cannot be opened\n", argv[0]);
        return 1;
    }
    m.n_blocks = (uint64_t)st.st_size / m.block;
    if (m.n_blocks == 0) {
        fprintf(stderr, "%s: shorter than a block\n", argv[0]);
        return 1;
    }
    m.most = strtoull(argv[3], NULL, 10) / m.block;
    if (m.most > m.n_blocks) m.most = m.n_blocks;
    if (m.most == 0) m.most = 1;
    for (m.stride = m.n_blocks * 5 / 8 + 1; common_divisor(m.stride, m.n_blocks) != 1; m.stride++) continue;
    const uint64_t start = k3_now_ns();
    uint32_t n = 0;
    while (n < n_threads && pthread_create(&thread[n], NULL, reader_main, &m) == 0) n++;
    for (uint32_t i = 0; i < n; i++) pthread_join(thread[i], NULL);
    const uint64_t ns = k3_now_ns() - start;
    if (n < n_threads || m.fault != 0) {
        fprintf(stderr, "%s: %s\n", argv[0], m.what.kind == K3_IO_ERROR ? strerror(m.what.error) : "could not be read whole");
        return 1;
    }
    printf("%llu %llu %d\n", (unsigned long long)(m.most * m.block), (unsigned long long)ns, m.file.is_direct);
    return 0;
}

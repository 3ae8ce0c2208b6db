/* Mapping files and laying out segments. Nothing here touches a weight: pages come in when an op reads them, unless the
 * weights are copied (copy.c) or read under a budget (residency.c). */
#include "memory.h"

#include "copy.h"
#include "huge.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define REFUSE(...) (snprintf(why, why_bytes, __VA_ARGS__), -1)

/* A checkpoint file, read-only. A size other than the header promised means that it was replaced since. It stays open, so
 * that it can be asked whether it is still the same. */
static int map_file(K3Memory *m, const K3Image *image, uint32_t index, char *why, size_t why_bytes) {
    const char *path = image->text + image->files[index].path_offset;
    const uint64_t bytes = image->files[index].bytes;
    if (m->base[index] != NULL) return 0;
    if (k3_io_adopt(&m->mapped[index], open(path, O_RDONLY | O_CLOEXEC), path, bytes, why, why_bytes) != 0) return -1;
    void *base = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, m->mapped[index].fd, 0);
    if (base == MAP_FAILED) return REFUSE("%s: %s", path, strerror(errno));
    m->base[index] = base;
    return 0;
}

/* Map the files that some tensor is read from in place: where weights are copied, only tables of rows are. */
static int map_files(K3Memory *m, const K3Image *image, int copies, char *why, size_t why_bytes) {
    for (uint32_t i = 0; i < image->n_tensors; i++) {
        const K3TensorRow *t = &image->tensors[i];
        if (copies && (t->place != K3_PLACE_FILE || !k3_is_row_table(image, i))) continue;
        if (t->place == K3_PLACE_FILE && map_file(m, image, t->file, why, why_bytes) != 0) return -1;
        for (uint32_t e = t->expert0; t->place == K3_PLACE_EXPERTS && e < t->expert0 + t->n_experts; e++)
            if (map_file(m, image, image->experts[e].packed_file, why, why_bytes) != 0 || map_file(m, image, image->experts[e].scale_file, why, why_bytes) != 0) return -1;
    }
    return 0;
}

/* safetensors promises no alignment: a tensor off its element's boundary is copied. */
static void *aligned(const char *data, uint64_t bytes, uint32_t elem_bytes) {
    if ((uintptr_t)data % elem_bytes == 0) return (void *)(uintptr_t)data;
    void *copy = k3_huge_alloc(bytes);
    if (copy != NULL) memcpy(copy, data, bytes);
    return copy;
}

/* `copy`: files' copies, 0 where weights are mapped. Tables of rows are mapped either way. */
static int place_tensors(K3Memory *m, const K3Image *image, const char **copy, char *why, size_t why_bytes) {
    const K3ImageHeader *h = image->header;
    char *arena = k3_huge_alloc(h->arena_bytes), *own = k3_huge_alloc(h->private_bytes);
    char *peer = k3_segment(m, h->rank) + m->stride - h->peer_bytes;
    if (arena == NULL || own == NULL) return REFUSE("memory for activations: %s", strerror(errno));
    for (uint32_t i = 0; i < image->n_tensors; i++) {
        const K3TensorRow *t = &image->tensors[i];
        const char **base = copy == NULL || k3_is_row_table(image, i) ? m->base : copy;
        void *p = NULL;
        for (uint32_t e = t->expert0; t->place == K3_PLACE_EXPERTS && e < t->expert0 + t->n_experts; e++) {
            const K3ExpertRow *row = &image->experts[e];
            m->experts[e].packed = (const uint8_t *)base[row->packed_file] + row->packed_offset;
            m->experts[e].scale = (const uint8_t *)base[row->scale_file] + row->scale_offset;
        }
        if (t->place == K3_PLACE_ARENA) p = arena + t->offset;
        else if (t->place == K3_PLACE_PRIVATE) p = own + t->offset;
        else if (t->place == K3_PLACE_PEER) p = peer + t->offset;
        else if (t->place == K3_PLACE_EXPERTS || t->place == K3_PLACE_SLOTS) p = m->experts + t->expert0;
        else if (t->place == K3_PLACE_PINNED || t->place == K3_PLACE_RING) p = k3_residency_tensor(m->residency, t);
        else p = aligned(base[t->file] + t->offset, t->bytes, t->elem_bytes);
        if (p == NULL) return REFUSE("memory for tensor %u: %s", i, strerror(errno));
        m->tensor[i] = p;
    }
    return 0;
}

/* Every rank sets the same length, so it does not matter who comes first. */
static int map_shared(K3Memory *m, const K3Image *image, const char *path, uint32_t n_lines, char *why,
                      size_t why_bytes) {
    const K3ImageHeader *h = image->header;
    const uint64_t gates = 2 * (uint64_t)h->max_gates * K3_LINE;
    m->stride = ((uint64_t)n_lines * K3_LINE + gates + h->peer_bytes + 4095) / 4096 * 4096;
    const uint64_t bytes = K3_SEGMENT_HEADER + m->stride * h->n_ranks;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return REFUSE("%s: %s", path, strerror(errno));
    void *base = ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (base == MAP_FAILED) return REFUSE("shared segments of %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
    m->shared = base;
    m->abort_word = base;
    return 0;
}

/* As many rows as the driver has made room for. */
static int map_logits(K3Memory *m, const K3Image *image, const char *path, char *why, size_t why_bytes) {
    const uint64_t row_bytes = (uint64_t)image->header->vocab * 4;
    struct stat st;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) return REFUSE("%s: %s", path, strerror(errno));
    if (st.st_size == 0 || (uint64_t)st.st_size % row_bytes != 0) return REFUSE("%s: wrong size", path);
    void *base = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) return REFUSE("%s: %s", path, strerror(errno));
    m->logits_file = base;
    m->logits_rows = (uint64_t)st.st_size / row_bytes;
    return 0;
}

int k3_memory_open(K3Memory *m, const K3Image *image, const char *shared_path, const char *logits_path, int copies,
                   uint32_t n_lines, char *why, size_t why_bytes) {
    memset(m, 0, sizeof *m);
    const char **copy = copies ? calloc(image->n_files + 1u, sizeof *copy) : NULL;
    m->base = calloc(image->n_files + 1u, sizeof *m->base);
    m->mapped = calloc(image->n_files + 1u, sizeof *m->mapped);
    m->tensor = calloc(image->n_tensors + 1u, sizeof *m->tensor);
    m->experts = calloc(image->n_experts + 1u, sizeof *m->experts);
    m->admitted = calloc(image->n_experts + 1u, sizeof *m->admitted);
    if (m->base == NULL || m->mapped == NULL || (copies && copy == NULL) || m->tensor == NULL || m->experts == NULL || m->admitted == NULL) return REFUSE("out of memory");
    if (map_files(m, image, copies, why, why_bytes) != 0) return -1;
    if (map_shared(m, image, shared_path, n_lines, why, why_bytes) != 0) return -1;
    if (logits_path != NULL && map_logits(m, image, logits_path, why, why_bytes) != 0) return -1;
    const K3ImageHeader *h = image->header;
    m->residency = k3_residency_open(image, m->experts, h->n_load_queues + h->n_fetch_queues, k3_progress_line(m, h->rank, 0), why, why_bytes);
    if (m->residency == NULL && why[0] != 0) return -1;
    if (copies && k3_copy_weights(image, copy, n_lines, k3_progress_line(m, h->rank, 0), why, why_bytes) != 0) return -1;
    const int rc = place_tensors(m, image, copy, why, why_bytes);
    free(copy);
    return rc;
}

int k3_memory_check(const K3Memory *m, const K3Image *image, K3IoFault *fault) {
    for (uint32_t i = 0; i < image->n_files; i++)
        if (m->base[i] != NULL && k3_io_check(&m->mapped[i], fault) != 0) {
            fault->file = i;
            return -1;
        }
    return 0;
}

int k3_memory_lost(const K3Memory *m, const K3Image *image, const void *address, K3IoFault *fault) {
    for (uint32_t i = 0; i < image->n_files; i++) {
        const uintptr_t first = (uintptr_t)m->base[i], at = (uintptr_t)address;
        const uint64_t bytes = image->files[i].bytes, offset = k3_io_down(at - first);
        if (first == 0 || at < first || offset >= bytes) continue;
        if (k3_io_check(&m->mapped[i], fault) == 0) *fault = (K3IoFault){.kind = K3_IO_ERROR, .error = EIO};
        fault->file = i;
        fault->offset = offset;
        fault->bytes = bytes - offset < K3_IO_PAGE ? bytes - offset : K3_IO_PAGE;
        return 0;
    }
    return -1;
}

void k3_memory_end_step(const K3Memory *m, const K3Image *image) {
    for (uint32_t i = 0; m->residency != NULL && i < image->n_tensors; i++) {
        const K3TensorRow *t = &image->tensors[i];
        if (t->place != K3_PLACE_FILE) continue;
        const uintptr_t first = (uintptr_t)m->tensor[i] & ~(uintptr_t)(K3_IO_PAGE - 1u);
        madvise((void *)first, (uintptr_t)m->tensor[i] + t->bytes - first, MADV_DONTNEED);
    }
}

/* A read is one system call where the device gives all of it at once; depth comes from several callers. */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int k3_io_open(K3IoFile *file, const char *path, uint64_t bytes, char *why, size_t why_bytes) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    /* EINVAL: a file system in memory, say, whose pages are the storage */
    const int is_direct = fd >= 0 || errno != EINVAL;
    const int rc = k3_io_adopt(file, is_direct ? fd : open(path, O_RDONLY | O_CLOEXEC), path, bytes, why, why_bytes);
    file->is_direct = is_direct;
    return rc;
}

int k3_io_adopt(K3IoFile *file, int fd, const char *path, uint64_t bytes, char *why, size_t why_bytes) {
    struct stat st;
    *file = (K3IoFile){.fd = fd};
    if (file->fd < 0 || fstat(file->fd, &st) != 0) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return -1;
    }
    if ((uint64_t)st.st_size != bytes) {
        snprintf(why, why_bytes, "%s: got %llu bytes, need %llu", path, (unsigned long long)st.st_size, (unsigned long long)bytes);
        return -1;
    }
    file->bytes = bytes;
    file->modified_s = st.st_mtim.tv_sec;
    file->modified_ns = st.st_mtim.tv_nsec;
    file->changed_s = st.st_ctim.tv_sec;
    file->changed_ns = st.st_ctim.tv_nsec;
    file->n_links = st.st_nlink;
    return 0;
}

static int refuse(K3IoFault *fault, uint32_t kind, int error, uint64_t offset, uint64_t bytes) {
    *fault = (K3IoFault){.kind = kind, .error = error, .offset = offset, .bytes = bytes};
    return -1;
}

int k3_io_check(const K3IoFile *file, K3IoFault *fault) {
    struct stat st;
#ifdef K3_CONTROL_TRUSTING /* only a test defines it: nobody asks, and another model's weights are used */
    return 0;
#endif
    if (fstat(file->fd, &st) != 0) return refuse(fault, K3_IO_ERROR, errno, 0, 0);
    const int is_modified = st.st_mtim.tv_sec != file->modified_s || st.st_mtim.tv_nsec != file->modified_ns;
    const int is_changed = st.st_ctim.tv_sec != file->changed_s || st.st_ctim.tv_nsec != file->changed_ns;
    if ((uint64_t)st.st_size == file->bytes && !is_modified && (!is_changed || st.st_nlink != file->n_links)) return 0;
    return refuse(fault, (uint64_t)st.st_size < file->bytes ? K3_IO_SHORT : K3_IO_CHANGED, 0, 0, 0);
}

int k3_io_read(const K3IoFile *file, uint64_t offset, uint64_t bytes, char *pages, K3IoFault *fault) {
    const uint64_t first = k3_io_down(offset), need = offset + bytes - first, all = k3_io_up(need);
    uint64_t got = 0;
    while (got < need) {
#ifdef K3_CONTROL_READ_ERROR /* only a test defines it: the device fails at the N-th read */
        static uint32_t n_reads;
        if (__atomic_add_fetch(&n_reads, 1u, __ATOMIC_RELAXED) >= (K3_CONTROL_READ_ERROR)) return refuse(fault, K3_IO_ERROR, EIO, offset, bytes);
#endif
        uint64_t ask = all - got;
#ifdef K3_CONTROL_SHORT_READS /* only a test defines it: the device gives a page at a time */
        ask = K3_IO_PAGE;
#endif
        const ssize_t n = pread(file->fd, pages + got, ask, (off_t)(first + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return refuse(fault, K3_IO_ERROR, errno, offset, bytes);
        const uint64_t at = got + (uint64_t)n;
        if (at < need && k3_io_down(at) <= got) return refuse(fault, K3_IO_SHORT, 0, offset, bytes);
        got = at < need ? k3_io_down(at) : at; /* a direct read goes on from a page's start */
    }
    if (!file->is_direct && !file->is_kept) posix_fadvise(file->fd, (off_t)first, (off_t)all, POSIX_FADV_DONTNEED);
    if (k3_io_check(file, fault) == 0) return 0;
    fault->offset = offset;
    fault->bytes = bytes;
    return -1;
}

void k3_io_words(const K3IoFault *fault, const char *path, char *why, size_t why_bytes) {
    snprintf(why, why_bytes, "%s: bytes %llu to %llu: %s", path, (unsigned long long)fault->offset, (unsigned long long)(fault->offset + fault->bytes),
             fault->kind == K3_IO_ERROR ? strerror(fault->error) : fault->kind == K3_IO_SHORT ? "the file ends before" : "changed since it was opened");
}

#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int k3_trace_open(K3Trace *trace, const char *path, uint32_t n_threads, char *why, size_t why_bytes) {
    const uint64_t lines = n_threads * sizeof(K3TraceLine);
    struct stat st;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_size < lines) {
        snprintf(why, why_bytes, "%s: %s", path, fd < 0 ? strerror(errno) : "too small for a trace");
        if (fd >= 0) close(fd);
        return -1;
    }
    char *base = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    close(fd);
    if (base == MAP_FAILED) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return -1;
    }
    trace->line = (K3TraceLine *)(void *)base;
    trace->events = (K3Event *)(void *)(base + lines);
    trace->capacity = ((uint64_t)st.st_size - lines) / sizeof(K3Event) / n_threads;
    return 0;
}

/* Anonymous memory in 2 MiB pages where the kernel has them: weights that are walked once miss the TLB on every
 * page, and with 4 KiB pages that costs 10 to 30 % of the bandwidth. */
#ifndef K3_CPU_HUGE_H
#define K3_CPU_HUGE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define K3_HUGE_PAGE ((uint64_t)2 << 20)

/* Zeroed memory for the life of the process, or NULL. From 2 MiB on it begins on a huge page's boundary: the
 * kernel backs only whole aligned pages, and mmap promises 4 KiB. */
static inline void *k3_huge_alloc(uint64_t bytes) {
    const uint64_t slack = bytes >= K3_HUGE_PAGE ? K3_HUGE_PAGE : 0;
    char *p = (char *)mmap(NULL, bytes + slack + (bytes == 0), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == (char *)MAP_FAILED) return NULL;
    if (slack == 0) return p;
    const uint64_t before = (K3_HUGE_PAGE - (uintptr_t)p % K3_HUGE_PAGE) % K3_HUGE_PAGE;
    if (before > 0) munmap(p, before);
    if (slack > before) munmap(p + before + (bytes + 4095) / 4096 * 4096, slack - before);
    madvise(p + before, bytes, MADV_HUGEPAGE); /* a kernel without them says no; 4 KiB pages serve too */
    return p + before;
}

#endif

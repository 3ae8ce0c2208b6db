/* Threads that op bodies run on. Their stack has a size of its own: a leaf that packs x (leaves/panel.h) keeps up to
 * 1.7 MB there, and the default follows `ulimit -s`, which may be less. */
#ifndef K3_CPU_THREAD_H
#define K3_CPU_THREAD_H

#include <pthread.h>
#include <stddef.h>
#include <sys/resource.h>

#define K3_STACK_BYTES ((size_t)8 << 20)

static inline int k3_thread_start(pthread_t *thread, void *(*body)(void *), void *argument) {
    pthread_attr_t attr;
    if (pthread_attr_init(&attr) != 0) return -1;
    int failed = pthread_attr_setstacksize(&attr, K3_STACK_BYTES);
    if (!failed) failed = pthread_create(thread, &attr, body, argument);
    pthread_attr_destroy(&attr);
    return failed ? -1 : 0;
}

/* The first thread is worker 0, and its stack grows up to the limit of the moment. Nonzero where that cannot be enough. */
static inline int k3_first_stack(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) != 0) return -1;
    if (limit.rlim_cur >= K3_STACK_BYTES) return 0; /* RLIM_INFINITY is the largest number */
    if (limit.rlim_max < K3_STACK_BYTES) return -1;
    limit.rlim_cur = K3_STACK_BYTES;
    return setrlimit(RLIMIT_STACK, &limit);
}

#endif

/* Leaf sets by cpuid, and the test of the one instruction whose arithmetic no manual of ours defines. */
#include "cpu.h"

#include <stdio.h>
#include <string.h>

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); }

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi");
}

/* vdpbf16ps against two fma, once a process. */
static int has_avx512_bf16(void) {
    static int answer = -1;
    if (answer < 0) {
        const uint32_t wrong = has_avx512() && __builtin_cpu_supports("avx512bf16") ? k3_bodies_avx512_bf16.self_test() : 0;
        answer = has_avx512() && __builtin_cpu_supports("avx512bf16") && wrong == 0;
        if (wrong > 0)
            fprintf(stderr, "k3-cpu: vdpbf16ps of this CPU: got other bits than two fma in %u lanes, need equal; avx512 leaves are used instead\n", wrong);
    }
    return answer;
}

typedef struct Choice {
    const K3Bodies *bodies;
    int (*is_here)(void);
} Choice;

static int always(void) { return 1; }

static const Choice CHOICES[] = {
    {&k3_bodies_avx512_bf16, has_avx512_bf16}, {&k3_bodies_avx512, has_avx512}, {&k3_bodies_avx2, has_avx2}, {&k3_bodies_scalar, always},
};

const K3Bodies *k3_bodies_here(uint32_t index) {
    for (uint32_t i = 0; i < sizeof CHOICES / sizeof *CHOICES; i++)
        if (CHOICES[i].is_here() && index-- == 0) return CHOICES[i].bodies;
    return NULL;
}

const K3Bodies *k3_choose_bodies(const char *leaves) {
    const K3Bodies *bodies;
    for (uint32_t i = 0; (bodies = k3_bodies_here(i)) != NULL; i++)
        if (strcmp(leaves, "auto") == 0 || strcmp(leaves, bodies->name) == 0) return bodies;
    return NULL;
}

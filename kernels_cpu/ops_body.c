/* Every op body with one set of leaves. Compiled four times (k3tool/runtime/build.py has the flags), with
 * K3_LEAVES_SCALAR, _AVX2, _AVX512 or _AVX512_BF16 defined; the bits are the same, the speed is not.
 * k3_ops.h is written by the build from the op table, so an op without a body does not compile. */
#include "bodies.h"

#include "leaves/select.h"

#include "k3_ops.h"

#if defined(K3_LEAVES_AVX512_BF16)
#include "leaves/dpbf16_peak.h"
#include "leaves/dpbf16_test.h"
#define K3_BODIES k3_bodies_avx512_bf16
#define K3_BODIES_NAME "avx512_bf16"
#elif defined(K3_LEAVES_AVX512)
#define K3_BODIES k3_bodies_avx512
#define K3_BODIES_NAME "avx512"
#elif defined(K3_LEAVES_AVX2)
#define K3_BODIES k3_bodies_avx2
#define K3_BODIES_NAME "avx2"
#elif defined(K3_LEAVES_SCALAR)
#define K3_BODIES k3_bodies_scalar
#define K3_BODIES_NAME "scalar"
#else
#error "no leaf set chosen"
#endif

static uint64_t digest(const uint32_t *words, uint64_t n, uint64_t key) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += k3_mix(words[i] ^ k3_mix(key + i));
    return sum;
}

/* K3_CONTROL_WITHOUT names an op whose handler is left out: the negative control of the gates that must
 * notice. Only tests define it. */
#ifdef K3_CONTROL_WITHOUT
#define K3_HANDLER(NAME, name) [K3_OP_##NAME] = K3_OP_##NAME == (K3_CONTROL_WITHOUT) ? 0 : k3_op_##name,
#else
#define K3_HANDLER(NAME, name) [K3_OP_##NAME] = k3_op_##name,
#endif

const K3Bodies K3_BODIES = {
    .name = K3_BODIES_NAME,
    .leaf = {.rows_bf16 = {k3_rows_dot_bf16, k3_rows_dot_bf16_x16},
             .rows_mxfp4 = {k3_rows_dot_mxfp4, k3_rows_dot_mxfp4_x16},
             .blocks_mxfp4 = {k3_rows_blocks_mxfp4, k3_rows_blocks_mxfp4_x16}},
#ifdef K3_LEAVES_AVX512_BF16
    .self_test = k3_dpbf16_mismatches,
    .pairs = k3_dpbf16_peak,
#endif
    .op = {{K3_OPS_CPU_DECODE(K3_HANDLER)}, {K3_OPS_CPU_PREFILL(K3_HANDLER)}},
    .digest = digest,
};

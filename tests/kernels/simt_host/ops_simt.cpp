/* Every op body with emulated lanes, under the export names of tests/kernels/shim_ops.c. k3_ops.h is written by
 * the test from the op table. */
#include "run_block.h"

#include "../../../kernels_common/simt_leaves.h"

#ifdef K3_HOST_SPARED
/* Bodies divide their loops among other lanes than leaves do: what happens to lie on the same lane is no order. */
#undef K3_FOR
#define K3_FOR(i, lo, hi) for (uint32_t i = (lo) + (K3_LANE + 37u) % K3_BLOCK_LANES; i < (hi); i += K3_BLOCK_LANES)
#endif

#include "k3_ops.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifndef K3_HOST_ORDER
#define K3_HOST_ORDER K3_HOST_FORWARD
#endif
static uint32_t order_of_lanes = K3_HOST_ORDER;

#ifdef K3_HOST_SPARED
/* No lane waits at the barrier of this file and line from now on; those met before are forgotten. */
EXPORT void t_spare(const char *file, uint32_t line) {
    __builtin_strncpy(k3_host_spared_file, file, sizeof k3_host_spared_file - 1u);
    k3_host_spared_line = line, k3_host_sites = 0;
}
/* The line of the i-th barrier met, and its file; 0 behind the last. */
EXPORT uint32_t t_met(uint32_t i, const char **file) {
    *file = i < k3_host_sites ? k3_host_site[i].file : "";
    return i < k3_host_sites ? k3_host_site[i].line : 0u;
}
#endif

EXPORT void t_order(uint32_t order) { order_of_lanes = order; }

/* A body with the signature of the CPU interpreter's table, whatever the op. */
EXPORT void k3_simt_op(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    run_block(order_of_lanes, [&] {
        switch (inst->op) {
#define K3_CASE(NAME, name)             \
    case K3_OP_##NAME:                  \
        k3_op_##name(c, inst, u0, u1);  \
        break;
            K3_SIMT_OPS(K3_CASE)
            default:
                k3_host_fail("no body for the opcode");
        }
    });
}

/* Sizes and step in one flat argument list; returns fault << 32 | detail. */
EXPORT uint64_t t_op(const K3Inst *inst, void *const *tensor, const K3Step *step, float *scratch,
                     uint32_t scratch_floats, uint32_t rank, uint32_t n_ranks, uint32_t max_tokens,
                     int64_t peer_stride, uint32_t u0, uint32_t u1) {
    K3Ctx c = {tensor, step, scratch, scratch_floats, rank, n_ranks, max_tokens, peer_stride, 0, 0};
    k3_simt_op(&c, inst, u0, u1);
    return (uint64_t)c.fault << 32 | c.fault_detail;
}

/* Every op body with emulated lanes, under the export names of tests/kernels/shim_ops.c. k3_ops.h is written by
 * the test from the op table. */
#include "run_block.h"

#include "../../../kernels_common/simt_leaves.h"

#include "k3_ops.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifndef K3_HOST_ORDER
#define K3_HOST_ORDER K3_HOST_FORWARD
#endif
static uint32_t order_of_lanes = K3_HOST_ORDER;

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

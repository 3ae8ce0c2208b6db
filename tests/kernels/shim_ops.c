/* Exports every op body of one compilation to ctypes: one call runs units [u0, u1) of one instruction.
 * k3_ops.h is written by the test from the op table. */
#include "ftz.h"
#include "leaves/select.h"

#include "k3_ops.h"

typedef void (*Body)(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1);
#define BODY(NAME, name) [K3_OP_##NAME] = k3_op_##name,
static const Body bodies[256] = {K3_OPS_CPU_DECODE(BODY)};

/* Sizes and step in one flat argument list; returns fault << 32 | detail. */
__attribute__((visibility("default"))) uint64_t t_op(const K3Inst *inst, void *const *tensor, const K3Step *step,
                                                     float *scratch, uint32_t scratch_floats, uint32_t rank,
                                                     uint32_t n_ranks, uint32_t max_tokens, int64_t peer_stride,
                                                     uint32_t u0, uint32_t u1) {
    K3Ctx c = {.tensor = tensor, .step = step, .scratch = scratch, .scratch_floats = scratch_floats, .rank = rank,
               .n_ranks = n_ranks, .max_tokens = max_tokens, .peer_stride = peer_stride};
    const uint32_t before = k3_set_ftz();
    bodies[inst->op](&c, inst, u0, u1);
    k3_restore_mxcsr(before);
    return (uint64_t)c.fault << 32 | c.fault_detail;
}

/* One slice of one instruction on a block of GPU lanes, for both vendors. C++.
 *
 * Not the interpreter: no queue, no waits, no signals. It makes every op body of a phase meet the vendor's
 * compiler, and a host can launch a single slice. k3_ops.h is the list of #include "ops/<name>.h" derived
 * from the op table, so an op without a body is a compile error that names it. */
#ifndef K3_SIMT_SLICE_H
#define K3_SIMT_SLICE_H

#include "k3.h"
#include "k3_math.h"
#include "simt_leaves.h"

#include "k3_ops.h"

#define K3_CASE(NAME, name)                    \
    case K3_OP_##NAME:                         \
        k3_op_##name(c, inst, unit0, unit1);   \
        break;

/* The kernel: units [unit0, unit1) of `inst` on one block. Lane 0 copies the context to the block's shared memory,
 * because every lane must see a trap, and returns the fault to where the host finds it. An opcode without a body
 * is a fault, never a no-op. */
#define K3_SLICE_KERNEL(kernel, OPS)                                                                    \
    extern "C" __global__ void __launch_bounds__(K3_BLOCK_LANES)                                        \
        kernel(K3Ctx *ctx, const K3Inst *inst, uint32_t unit0, uint32_t unit1) {                        \
        __shared__ K3Ctx shared;                                                                        \
        K3Ctx *c = &shared;                                                                             \
        if (K3_LANE0) *c = *ctx;                                                                        \
        K3_SYNC(c);                                                                                     \
        switch (inst->op) {                                                                             \
            OPS(K3_CASE)                                                                                \
            default:                                                                                    \
                if (K3_LANE0) k3_trap(c, K3_FAULT_OPCODE, inst->op);                                    \
        }                                                                                               \
        K3_SYNC(c);                                                                                     \
        if (K3_LANE0) ctx->fault = c->fault, ctx->fault_detail = c->fault_detail;                       \
    }

/* Rule 1's canaries, to be run before the first step: in = {a, c, subnormal, 1, 2^-126, 2, -2^-76, 2^-76}, for the
 * host to compare out with what the contract says. No operand is a constant: x * 1 would be folded to x. */
#define K3_CANARY_KERNEL(kernel)                                              \
    extern "C" __global__ void kernel(const float *in, float *out) {          \
        if (!K3_LANE0) return;                                                \
        out[0] = in[0] * in[0] + in[1];                                       \
        out[1] = in[2] * in[3];                                               \
        out[2] = in[4] / in[5];                                               \
        out[3] = k3_fma(in[6], in[7], in[4]);                                 \
    }

#endif

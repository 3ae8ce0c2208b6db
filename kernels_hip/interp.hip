/* The interpreter on AMD GPUs: a workgroup of 512 lanes (8 waves of 64) a worker, an L2 cache for each XCD.
 *
 * k3tool/runtime/gpu_source.py puts the phases and the program's opcodes before this text. A workgroup reads once which XCD it is on
 * and takes entries of that domain's window through a cursor; any number of workgroups does, all resident. */
#include "simt_interp.h"

extern "C" __global__ void __launch_bounds__(K3_BLOCK_LANES) k3_interp(const K3Launch *l) {
    __shared__ K3Block block;
    k3_interpret(&block, l);
}

extern "C" __device__ __attribute__((used)) const K3Identity k3_identity = K3_IDENTITY;
K3_CANARY_KERNEL(k3_canary)
K3_BARRIER_KERNEL(k3_barrier)

/* The interpreter on NVIDIA GPUs: one cooperative launch, a block of 256 lanes a worker, one L2 cache.
 *
 * k3tool/runtime/gpu_source.py puts the phases and the program's opcodes before this text. Block b runs queue b, so the grid has as
 * many blocks as the stream has workgroups, all resident. */
#include "simt_interp.h"

/* The 1: a block has its SM to itself, so its registers need not be few; else small builds spill for a second block. */
extern "C" __global__ void __launch_bounds__(K3_BLOCK_LANES, 1) k3_interp(const K3Launch *l) {
    __shared__ K3Block block;
    k3_interpret(&block, l);
}

extern "C" __constant__ K3Identity k3_identity = K3_IDENTITY;
K3_CANARY_KERNEL(k3_canary)
K3_BARRIER_KERNEL(k3_barrier)

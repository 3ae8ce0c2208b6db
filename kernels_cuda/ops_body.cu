/* Every op body of one phase, compiled for this vendor. K3_PHASE_PREFILL chooses prefill, else decode. */
#include "simt_slice.h"

#ifdef K3_PHASE_PREFILL
K3_SLICE_KERNEL(k3_slice, K3_OPS_CUDA_PREFILL)
#else
K3_SLICE_KERNEL(k3_slice, K3_OPS_CUDA_DECODE)
#endif
K3_CANARY_KERNEL(k3_canary)

/* Every op body of each phase, compiled for this vendor. */
#include "simt_slice.h"

K3_SLICE_FUNCTION(k3_run_decode, K3_OPS_HIP_DECODE)
K3_SLICE_FUNCTION(k3_run_prefill, K3_OPS_HIP_PREFILL)

K3_SLICE_KERNEL(k3_slice_decode, k3_run_decode)
K3_SLICE_KERNEL(k3_slice_prefill, k3_run_prefill)
K3_CANARY_KERNEL(k3_canary)

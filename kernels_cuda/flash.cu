/* The interpreter of programs that attend page by page, on NVIDIA GPUs: interp.cu with pages in shared memory
 * (kernels_common/simt_flash.h). k3tool/targets.py says when it serves. */
#define K3_FLASH 1
#include "interp.cu"

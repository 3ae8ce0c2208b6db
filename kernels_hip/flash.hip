/* The interpreter of programs that attend page by page, on AMD GPUs: interp.hip with pages in LDS
 * (kernels_common/simt_flash.h). k3tool/targets.py says when it serves. */
#define K3_FLASH 1
#include "interp.hip"

/* A stand-in for what hipRTC declares before any source: its names, as far as a source could trip over them.
 *
 * Written after the documentation and the headers of HIP 5 to 7, not taken from them; hipRTC itself has not been run.
 * There is no header to include. HIP_NO_STD: ROCm 7, which no longer declares the names of the standard library. */
#define __HIPCC_RTC__ 1
#define __HIPCC__ 1
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define surface_at_most(lanes, ...) __attribute__((amdgpu_flat_work_group_size(1, lanes)))
#define __launch_bounds__(...) surface_at_most(__VA_ARGS__, 0)
typedef __SIZE_TYPE__ size_t;
#ifndef HIP_NO_STD
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef signed int int32_t;
typedef signed long long int64_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
namespace std {
using ::int32_t;
using ::int64_t;
using ::uint32_t;
using ::uint64_t;
}
#endif
struct dim3 {
    unsigned int x, y, z;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
static constexpr int warpSize = 64;
extern "C" __device__ float __ocml_fma_f32(float, float, float);
__device__ float fmaf(float, float, float);
__device__ float __shfl_xor(float, int, int = warpSize);
__device__ unsigned int atomicAdd(unsigned int *, unsigned int);
__device__ void __syncthreads();
__device__ unsigned int __lane_id();
template <class T>
__device__ T max(T, T);
template <class T>
__device__ T min(T, T);

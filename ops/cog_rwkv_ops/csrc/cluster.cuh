// Clusters: neighbouring blocks that reach into each other's shared memory, from compute capability 9.0 on. `blocks` is
// how many a cluster has; 1 where there are none.
#pragma once

#include "cuda.cuh"

namespace cog_rwkv {

__device__ __forceinline__ void cluster_arrive(unsigned blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

__device__ __forceinline__ void cluster_wait(unsigned blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Four floats at the address `at` of this block's shared memory, of the block `block` of the cluster. Loads behind each
// other are under way together.
__device__ __forceinline__ float4 cluster_load(uint32_t at, unsigned block, unsigned blocks) {
  float4 v;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there));
    return v;
  }
#endif
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
  return v;
}

// How many clusters of so many blocks the device runs at once; 0 where the kernel was compiled without them.
template <class Kernel>
int clusters_at_once(const char* op, Kernel kernel, unsigned blocks, int threads, size_t bytes) {
  cudaFuncAttributes attributes;
  check_cuda(op, cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.ptxVersion < 90) return 0;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  check_cuda(op, cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  return count;
}

}  // namespace cog_rwkv

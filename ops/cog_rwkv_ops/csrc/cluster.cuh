// Blocks that run at the same time and write into each other's shared memory: clusters, on Hopper and later. A kernel
// that uses this also runs in blocks that are alone, on any GPU.
#pragma once

#include "cuda.cuh"
#include "shared.cuh"

namespace cog_rwkv {

constexpr int kMostInCluster = 8;  // that every device with clusters allows

// Which block of its cluster this is, in clusters of `size` along x.
__device__ __forceinline__ uint32_t rank_in_cluster(uint32_t size) { return blockIdx.x % size; }

// Writes v to the place of `to`, in shared memory, in block `rank` of the cluster.
__device__ __forceinline__ void store_in_block(uint32_t rank, float2* to, float2 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(v.x), "f"(v.y) : "memory");
#else
  *to = v;
#endif
}

// A barrier of all threads of a cluster in two halves: what was written before the first is there after the second.
__device__ __forceinline__ void arrive_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace cog_rwkv

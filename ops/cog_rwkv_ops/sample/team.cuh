// The blocks that share one row of logits: a cluster on 9.0 and later, one block before. And sums over a block.
#pragma once

#include <cooperative_groups.h>

#include "../csrc/cuda.cuh"
#include "../csrc/reduce.cuh"

namespace cog_rwkv::sampling {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMostBlocks = 8;

// Whose blocks are neighbours in the grid; `size` is 1, 2, 4 or 8.
struct Team {
  int size;

  __device__ int rank() const { return static_cast<int>(blockIdx.x) & (size - 1); }

  // All threads of all blocks: what they wrote before, in shared memory too, the others see afterwards.
  __device__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
  }

  // Block `rank`'s own copy of what lies at `mine` in shared memory.
  template <class X>
  __device__ const X* peer(const X* mine, int rank) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
#endif
    return mine;
  }

  // What block number `lane` has at `mine`, in that lane of every warp; 0 in lanes without a block.
  template <class X>
  __device__ X by_lane(const X* mine) const {
    const int lane = threadIdx.x % 32;
    return lane < size ? *peer(mine, lane) : X{0};
  }
};

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// The sum up to this lane, its own included.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// Of `x` over the threads of the block: the sum of all, and the sum up to this thread, its own included. Every thread
// calls it; `shared` has room for kWarps, which nobody reads any more when the next barrier is passed.
struct Scan {
  uint64_t total, upto;
};
__device__ __forceinline__ Scan block_scan(uint64_t x, uint64_t* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Scan scan{0, warp_scan(x)};
  __syncthreads();  // whoever still reads what an earlier call left
  if (lane == 31) shared[warp] = scan.upto;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) scan.upto += shared[w];
    scan.total += shared[w];
  }
  return scan;
}

}  // namespace cog_rwkv::sampling

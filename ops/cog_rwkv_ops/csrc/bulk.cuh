// Bulk copies from global into shared memory, on Hopper and later.
#pragma once

#include "shared.cuh"

namespace cog_rwkv {

// Counts on a barrier in shared memory when it is there. Addresses lie on 16-byte boundaries, and `bytes` is a multiple
// of 16.
__device__ __forceinline__ void copy_in(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

}  // namespace cog_rwkv

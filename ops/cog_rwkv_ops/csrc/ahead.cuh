// Copies into shared memory that a thread begins and waits for later, each group of them after the one before it.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda.cuh"
#include "shared.cuh"

namespace cog_rwkv {

// 8 or 16 bytes, both ends on a boundary of as many.
template <int bytes>
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(bytes)
                 : "memory");
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// The copies since the last call are a group.
__device__ __forceinline__ void end_group() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until this thread's copies have arrived, but for the last `pending` groups.
template <int pending>
__device__ __forceinline__ void wait_for_all_but() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

}  // namespace cog_rwkv

// Barriers in shared memory that some warps arrive on while others wait.
#pragma once

#include "shared.cuh"

namespace cog_rwkv {

// A barrier in shared memory: it turns to its next phase when `count` threads have arrived.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// By all lanes of a warp, though one after a __syncwarp() would do: compute-sanitizer's racecheck takes an arrival for
// the lane's own, and reports what the other lanes read or wrote before.
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// For a whole warp: until the phase of this parity is over. The phase before the first counts as one of parity 1 that
// is.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    // Asleep, up to so many nanoseconds: a warp that polls takes its neighbours' turns.
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity), "r"(1000000)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
  }
  __syncwarp();
}

}  // namespace cog_rwkv

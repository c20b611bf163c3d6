// Bulk copies between global and shared memory, on Hopper and later, and flags by which blocks tell of what they left
// in global memory. Addresses lie on 16-byte boundaries, and bytes are a multiple of 16.
#pragma once

#include "cluster.cuh"

namespace cog_rwkv {

// Between what a thread did to memory itself and what bulk copies do to it next, or the other way round.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for shared memory alone, which is faster.
__device__ __forceinline__ void fence_bulk_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Counts on a barrier in shared memory when it is there.
__device__ __forceinline__ void copy_in(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// The same in both blocks of a cluster of two, for each at the same place and on its own barrier.
__device__ __forceinline__ void copy_in_both(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ void copy_out(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until what this thread's copies out read may be overwritten.
__device__ __forceinline__ void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Sets a flag when this thread's copies out have arrived: who sees it may copy them in.
__device__ __forceinline__ void publish(uint32_t* flag) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  fence_bulk();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

__device__ __forceinline__ bool is_published(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  fence_bulk();
  return value != 0;
}

}  // namespace cog_rwkv

// Blocks that run at the same time and send to each other's shared memory: clusters, on Hopper and later. A kernel that
// uses this also runs in blocks that are alone, on any GPU.
//
// What is sent counts on a barrier where it arrives. A barrier of the whole cluster instead would have each thread wait
// until all that it wrote to global memory is there.
#pragma once

#include "cuda.cuh"
#include "shared.cuh"

namespace cog_rwkv {

constexpr int kMostInCluster = 8;  // that every device with clusters allows

// After a thread has made barriers, before it greets the others.
__device__ __forceinline__ void tell_of_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One thread makes its block's inbox ready, then all threads of a cluster greet each other, in two halves; between
// these they may do other things. After that there may be mail.
__device__ __forceinline__ void make_inbox(uint64_t* inbox) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inbox)) : "memory");
#endif
  tell_of_barriers();
}
__device__ __forceinline__ void begin_greeting() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void end_greeting() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Sends v to the place of `to`, and a note of it to that of `inbox`, both in shared memory, in block `rank`.
__device__ __forceinline__ void send_to_block(uint32_t rank, float2* to, float2 v, uint64_t* inbox) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there, note;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(note) : "r"(shared_address(inbox)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(there),
               "f"(v.x), "f"(v.y), "r"(note)
               : "memory");
#endif
}

// One thread of the block says, once for each delivery, how many bytes there will be. These may already be there.
__device__ __forceinline__ void expect_bytes(uint64_t* inbox, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)), "r"(bytes)
               : "memory");
#endif
}

// Until a delivery is there: `parity` is 0 for an inbox's first one, 1 for the second, and so on in turns.
__device__ __forceinline__ void wait_for_bytes(uint64_t* inbox, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(inbox)), "r"(parity)
                 : "memory");
  }
  __syncwarp();
#endif
}

}  // namespace cog_rwkv

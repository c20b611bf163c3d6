// Two parts of the terms of a tile, in a cluster of two blocks: each sends the other the sums of half of the rows, or
// of the tokens, and ends the other half. That is less than to write both to memory and to add them up there.
#pragma once

#include "../csrc/cluster.cuh"
#include "wide_shape.cuh"

namespace cog_rwkv {

#if COG_RWKV_WGMMA

// On which a block waits until the other one has read its stages, and until its mail is there.
template <class S>
__device__ __forceinline__ uint32_t stages_free(const WideMemory<S>& memory) {
  return memory.empty(S::STAGES);
}
template <class S>
__device__ __forceinline__ uint32_t mail_there(const WideMemory<S>& memory) {
  return memory.empty(S::STAGES) + 8;
}

// Before init_barriers().
template <class S>
__device__ __forceinline__ void init_mail(const WideMemory<S>& memory) {
  static_assert(16 * S::STAGES + 16 <= S::barriers);
  if (threadIdx.x != 0) return;
  barrier_init(stages_free(memory), kSumThreads);
  barrier_init(mail_there(memory), kSumThreads / 2);
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// What this thread did before is done for whoever waits for the barrier, which is in either block. By all lanes, as
// csrc/barriers.cuh says.
__device__ __forceinline__ void arrive_in(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(uint32_t barrier) {
  asm volatile(
      "{.reg .pred done; wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; @done bra.uni "
      "end; bra.uni wait; end:}" ::"r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send_four(uint32_t to, const float* four) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]),
               "f"(four[3])
               : "memory");
}
__device__ __forceinline__ void add_four(float* four, uint32_t from) {
  float more[4];
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(more[0]), "=f"(more[1]), "=f"(more[2]), "=f"(more[3])
               : "r"(from)
               : "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) four[i] += more[i];
}

// Group i of block i gets the sums of both blocks, which the other group sends. Returns whether this group has them.
// A block has one unit, so its stages are free after that.
template <class S>
__device__ __forceinline__ bool join_parts(float (&sums)[S::BLOCKS][S::N / 2], const WideMemory<S>& memory,
                                           uint32_t rank) {
  const uint32_t mine = memory.stage(0) + threadIdx.x % 128 * 16;
  const bool sends = threadIdx.x / 128 != rank;
  arrive_in(in_block(stages_free(memory), rank ^ 1));
  wait_for_cluster(sends ? stages_free(memory) : mail_there(memory));
  const uint32_t there = in_block(mine, rank ^ 1);
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int j = 0; j < S::N / 2; j += 4) {
      const uint32_t at = (b * (S::N / 8) + j / 4) * 2048;
      if (sends) {
        send_four(there + at, &sums[b][j]);
      } else {
        add_four(&sums[b][j], mine + at);
      }
    }
  }
  if (sends) arrive_in(in_block(mail_there(memory), rank ^ 1));
  return !sends;
}
#endif

}  // namespace cog_rwkv

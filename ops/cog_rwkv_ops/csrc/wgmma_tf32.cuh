// Products in tf32 by Hopper's tensor cores, with the left operand in registers (csrc/wgmma.cuh has the tiles: here
// lines of 32 floats, along the terms of the sums).
#pragma once

#include "wgmma.cuh"

namespace cog_rwkv {

#if COG_RWKV_WGMMA
// d += eight terms of 64 rows, which `left` has as mma.m16n8k8 wants them of each of the four warps, times 32 or 64
// columns. A first product overwrites the sums.
#define COG_RWKV_WGMMA_TF32(n, sums, a0, a1, a2, a3, b, first, ...)                                          \
  asm volatile("{.reg .pred add; setp.eq.u32 add, %" #first ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
               "k8.f32.tf32.tf32 {" sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", add, 1, 1;}" \
               : __VA_ARGS__                                                                                 \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(int(is_first)))

template <bool is_first>
__device__ __forceinline__ void wgmma_tf32(float (&d)[16], const uint32_t (&left)[4], uint64_t right) {
  COG_RWKV_WGMMA_TF32(32, COG_RWKV_SUMS16, 16, 17, 18, 19, 20, 21, COG_RWKV_16(d, 0));
}

template <bool is_first>
__device__ __forceinline__ void wgmma_tf32(float (&d)[32], const uint32_t (&left)[4], uint64_t right) {
  COG_RWKV_WGMMA_TF32(64, COG_RWKV_SUMS32, 32, 33, 34, 35, 36, 37, COG_RWKV_32(d, 0));
}

// Before a fence: the operands are in their registers, and not made between the products.
template <int COUNT>
__device__ __forceinline__ void operands_ready(uint32_t (&left)[COUNT][4]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    asm volatile("" : "+r"(left[j][0]), "+r"(left[j][1]), "+r"(left[j][2]), "+r"(left[j][3])::"memory");
  }
}

// Behind a wait: until there, registers that products took operands from stay as they were.
template <int COUNT>
__device__ __forceinline__ void operands_read(const uint32_t (&left)[COUNT][4]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    asm volatile("" ::"r"(left[j][0]), "r"(left[j][1]), "r"(left[j][2]), "r"(left[j][3]));
  }
}
#endif

}  // namespace cog_rwkv

// The shared memory of wkv7 in chunks: where the numbers of 16 tokens lie, and in which order a lane takes them.
#pragma once

#include "../csrc/barriers.cuh"
#include "../csrc/mma.cuh"
#include "work.cuh"

namespace cog_rwkv {

constexpr int kChunk = 16, kWarp = 32;
// Floats from a row of 64 to the next, and from a row of 16 to the next: such that no two lanes meet in a bank.
constexpr int kRow = 76, kSmallRow = 24;

// Where in a row a key is: the upper half stands off for the sake of the banks.
__device__ __forceinline__ constexpr int place(int key) { return key + (key >= 32 ? 8 : 0); }

// A chunk. The inputs are scaled in place, v excepted; a becomes W, w makes room for what is between tokens. What
// consumers read comes first, v last of that, as it is shorter where the inputs are.
struct Slot {
  static constexpr int kMatrix = kChunk * kRow, kSmall = kChunk * kSmallRow;
  static constexpr int kBeforeValues = 5 * kMatrix + 2 * static_cast<int>(kHead);
  static constexpr int kFloats = kBeforeValues + kMatrix + kSmall, kBytes = kFloats * 4;
  template <class T>
  static constexpr int kValueRow = sizeof(T) == 4 ? kRow : 36;  // floats from a row of v to the next

  float* base;
  __device__ float* matrix(int input) const { return base + (input < kV ? input : input - 1) * kMatrix; }  // not of v
  __device__ float* row(int input, int t) const { return matrix(input) + t * kRow; }
  template <class T>
  __device__ T* values(int t) const {
    return reinterpret_cast<T*>(base + kBeforeValues + t * kValueRow<T>);
  }
  __device__ float* seen() const { return matrix(kW); }                         // P: what y has of v
  __device__ float* seen_removed() const { return seen() + kSmall; }            // Q: what y has of U
  __device__ float* removed() const { return seen() + 2 * kSmall; }             // A: what U has of v
  __device__ float* inverse() const { return base + kBeforeValues + kMatrix; }  // T
  __device__ float* before() const { return base + 5 * kMatrix; }               // e^m, in the order of keys
  __device__ float* after() const { return before() + kHead; }                  // e^(G - m)
};

__device__ __forceinline__ float4& float4_at(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ __forceinline__ const float4& float4_at(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float2& float2_at(float* p) { return *reinterpret_cast<float2*>(p); }
__device__ __forceinline__ const float2& float2_at(const float* p) { return *reinterpret_cast<const float2*>(p); }

// Results of 16 x 64 are eight of 16 x 8, four for each of two warps, `part`: column n of the j-th of them is key
// 8 n + 4 (part ^ (n odd)) + j. So what a lane has of a row are eight of the keys 16 q to 16 q + 15: of its columns
// 2 q + odd, four from this one.
__device__ __forceinline__ constexpr int first_key(int part, int odd) { return 8 * odd + 4 * (part ^ odd); }

// The same columns as a right operand with a row of keys: b[j] is that of column g in the j-th.
__device__ __forceinline__ void load_columns(float (&b)[4], const float* row, int part, int g) {
  const float4 v = float4_at(row + place(8 * g) + 4 * (part ^ (g & 1)));
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// Tokens 8 step + 2 q and the next are what a lane has of a product over tokens: columns t and t + 1 of a small matrix.
__device__ __forceinline__ float2 load_tokens(const float* small, int row, int step, int q) {
  return *reinterpret_cast<const float2*>(small + row * kSmallRow + 8 * step + 2 * q);
}

// Until both of two warps are here, which share barrier `id`, 1 to 15.
__device__ __forceinline__ void sync_pair(int id) { asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory"); }

}  // namespace cog_rwkv

// Eight neighbouring channels a thread, 16 bytes at a time, and eight threads a head: for kernels that go through the
// heads of many tokens.
#pragma once

#include <algorithm>
#include <numeric>

#include "packed_store.cuh"

namespace cog_rwkv {

constexpr int kEightsThreads = 256;
constexpr int kEightsBlocks = 3;  // a multiprocessor, at 80 registers a thread

// From and to a 16-byte boundary.
template <class T>
__device__ __forceinline__ void load_eight(float (&x)[8], const T* from) {
  constexpr int at_once = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += at_once) {
    const Vector<T, at_once> v = load_vector<T, at_once>(from + i);
#pragma unroll
    for (int j = 0; j < at_once; j++) x[i + j] = static_cast<float>(v.values[j]);
  }
}

template <class T>
__device__ __forceinline__ void store_eight(T* to, const float (&x)[8]) {
  constexpr int at_once = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += at_once) {
    Vector<T, at_once> v;
#pragma unroll
    for (int j = 0; j < at_once; j++) v.values[j] = static_cast<T>(x[i + j]);
    store_packed<T, at_once>(to + i, v);
  }
}

// Where a thread is among tokens of `channels` each, and how it goes on: always with the same channels. `count` is
// tokens * channels / 8. Threads of a warp stay together, as they add up what they have: some are beyond the end.
struct Eights {
  int64_t at, count, step;
  uint32_t channel;

  __device__ Eights(int64_t count, uint32_t channels)
      : at(blockIdx.x * int64_t{kEightsThreads} + threadIdx.x),
        count(count),
        step(gridDim.x * int64_t{kEightsThreads}),
        channel(static_cast<uint32_t>(at % (channels / 8)) * 8) {}

  __device__ __forceinline__ bool any() const { return at - threadIdx.x % 32 < count; }  // of the warp
  __device__ __forceinline__ bool inside() const { return at < count; }
  __device__ __forceinline__ void next() { at += step; }
};

// Blocks for that, as many as run at a time where there is work for them; together they take whole tokens.
inline unsigned eights_blocks(int64_t tokens, int64_t channels, int multiprocessors) {
  const int64_t each = channels / 8, whole = each / std::gcd(each, int64_t{kEightsThreads});
  const int64_t wanted =
      std::min<int64_t>((tokens * each + kEightsThreads - 1) / kEightsThreads, kEightsBlocks * multiprocessors);
  return static_cast<unsigned>((wanted + whole - 1) / whole * whole);
}

}  // namespace cog_rwkv

// A vector of C values in the registers of a warp, and its products with rows of 16-bit weights in shared memory.
//
// Piece i of 8 values, i < C / 256, is lane's at 256 i + 8 lane.
#pragma once

#include <type_traits>

#include "../../csrc/cuda.cuh"
#include "../../csrc/reduce.cuh"

namespace cog_rwkv {

struct alignas(16) Words {
  uint32_t at[4];
};

// Two values that lie in a word.
template <class W>
__device__ __forceinline__ float2 pair_in(uint32_t word) {
  if constexpr (std::is_same_v<W, BFloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    union {
      uint32_t word;
      Vector<W, 2> pair;
    } both = {word};
    return make_float2(static_cast<float>(both.pair.values[0]), static_cast<float>(both.pair.values[1]));
  }
}

// V: pieces at most; 16 / V rows are multiplied at a time.
template <class W, int V>
struct WarpVector {
  static constexpr int kRows = 16 / V;
  float x[V * 8];
  uint32_t pieces;

  // From shared memory.
  __device__ __forceinline__ WarpVector(const W* from, uint32_t c) : pieces(c / 256) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const Words w = piece(reinterpret_cast<const unsigned char*>(from) + threadIdx.x % 32 * 16, i);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 two = pair_in<W>(i < pieces ? w.at[j] : 0);
        x[i * 8 + j * 2] = two.x, x[i * 8 + j * 2 + 1] = two.y;
      }
    }
  }

  // Piece i of a row, or the last one, whose values are then multiplied by 0.
  __device__ __forceinline__ Words piece(const unsigned char* row, uint32_t i) const {
    return *reinterpret_cast<const Words*>(row + min(i, pieces - 1) * 512);
  }

  // Calls f(number, product) for `rows` rows, each by one lane.
  template <class F>
  __device__ __forceinline__ void multiply(const unsigned char* from, uint32_t rows, F f) const {
    const unsigned char* row = from + threadIdx.x % 32 * 16;
    uint32_t r = 0;
#pragma unroll 1
    for (; r + kRows <= rows; r += kRows, row += kRows * pieces * 512) some<kRows>(row, r, f);
#pragma unroll 1
    for (; r < rows; r++, row += pieces * 512) some<1>(row, r, f);
  }

 private:
  template <int R, class F>
  __device__ __forceinline__ void some(const unsigned char* row, uint32_t first, F f) const {
    float sums[R][2] = {};
#pragma unroll
    for (int i = 0; i < V; i++) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        const Words w = piece(row + r * pieces * 512, i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 two = pair_in<W>(w.at[j]);
          const int at = i * 8 + j * 2;
          sums[r][0] = fmaf(two.x, x[at], sums[r][0]), sums[r][1] = fmaf(two.y, x[at + 1], sums[r][1]);
        }
      }
    }
    const int lane = threadIdx.x % 32;
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float sum = reduce_lanes(sums[r][0] + sums[r][1], Add{});
      if (lane == r) mine = sum;
    }
    if (lane < R) f(first + lane, mine);
  }
};

}  // namespace cog_rwkv

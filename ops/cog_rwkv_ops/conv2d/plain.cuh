// conv2d for any dtype and any number of channels: tiles in shared memory, multiplied by the usual arithmetic units.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/cuda.cuh"
#include "conv2d.h"

namespace cog_rwkv {

constexpr int kTile = 64, kDeep = 16, kPlainThreads = 256;  // a tile of 64 x 64 results, 16 terms of their sums at once

// sum[i][j] += the products of a tile, for a thread's 4 x 4 results.
template <class A>
__device__ __forceinline__ void multiply_tile(const A (*left)[kTile + 4], const A (*right)[kTile + 4], A (*sum)[4]) {
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll
  for (int d = 0; d < kDeep; d++) {
    A a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = left[d][row + i], b[i] = right[d][column + i];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) sum[i][j] += a[i] * b[j];
    }
  }
}

// A tile is 64 places and 64 channels of a group.
template <class T>
__global__ void __launch_bounds__(kPlainThreads) plain_gather_kernel(Gather<T> a, int64_t tiles, int64_t width_tiles) {
  using A = arithmetic_t<T>;
  __shared__ A left[kDeep][kTile + 4], right[kDeep][kTile + 4];
  const int64_t places = a.places(), in_c = a.groups * a.depth, out_c = a.groups * a.width;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t o0 = tile % width_tiles * kTile, group = tile / width_tiles % a.groups;
    const int64_t place0 = tile / (width_tiles * a.groups) * kTile;
    // The place and the channel that this thread loads: term d = threadIdx.x % 16 of every sixteenth of them.
    const int d_mine = threadIdx.x % kDeep, first = threadIdx.x / kDeep;
    A sum[4][4] = {};
    for (int t = 0; t < a.h.taps * a.w.taps; t++) {
      const int ti = t / a.w.taps, tj = t % a.w.taps;
      const int64_t r = a.h.weight_first + ti * a.h.weight_step, s = a.w.weight_first + tj * a.w.weight_step;
      const T* from[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t place = place0 + first + 16 * i;
        const int64_t row = place / a.w.size % a.h.size * a.h.step + a.h.first + ti * a.h.tap_step;
        const int64_t column = place % a.w.size * a.w.step + a.w.first + tj * a.w.tap_step;
        const bool in = place < places && row >= 0 && row < a.h.in_size && column >= 0 && column < a.w.in_size;
        const int64_t n = place / a.w.size / a.h.size;
        from[i] = in ? a.in + ((n * a.h.in_size + row) * a.w.in_size + column) * in_c + group * a.depth : nullptr;
      }
      for (int64_t d0 = 0; d0 < a.depth; d0 += kDeep) {
        const int64_t d = d0 + d_mine;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int64_t o = o0 + first + 16 * i;
          const bool in = d < a.depth && from[i] != nullptr, weighted = d < a.depth && o < a.width;
          left[d_mine][first + 16 * i] = in ? static_cast<A>(from[i][d]) : A{0};
          right[d_mine][first + 16 * i] = weighted ? static_cast<A>(a.weight[a.weight_at(group, d, o, r, s)]) : A{0};
        }
        __syncthreads();
        multiply_tile(left, right, sum);
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t place = place0 + threadIdx.x / 16 * 4 + i;
      if (place >= places) continue;
      const int64_t row = place / a.w.size % a.h.size * a.h.out_step + a.h.out_first;
      const int64_t column = place % a.w.size * a.w.out_step + a.w.out_first, n = place / a.w.size / a.h.size;
      T* to = a.out + ((n * a.h.out_size + row) * a.w.out_size + column) * out_c + group * a.width;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int64_t o = o0 + threadIdx.x % 16 * 4 + j;
        if (o >= a.width) continue;
        const A bias = a.bias == nullptr ? A{0} : static_cast<A>(a.bias[group * a.width + o]);
        to[o] = static_cast<T>(sum[i][j] + bias);
      }
    }
  }
}

// A tile is 64 outputs k of a group and 64 of its R S C / groups columns; blockIdx.y is one of the parts into which the
// places are cut, each with a result of its own, [parts][K][R S C / groups].
template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_weight_kernel(const T* __restrict__ gradient, const T* __restrict__ x, arithmetic_t<T>* __restrict__ out,
                        ConvSizes z, int64_t tiles, int64_t part) {
  using A = arithmetic_t<T>;
  __shared__ A left[kDeep][kTile + 4], right[kDeep][kTile + 4];
  const int64_t columns = z.r * z.s * z.c_group(), column_tiles = (columns + kTile - 1) / kTile;
  const int64_t k_tiles = (z.k_group() + kTile - 1) / kTile, places = z.n * z.p * z.q;
  const int64_t begin = blockIdx.y * part, end = min(begin + part, places);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t j0 = tile % column_tiles * kTile, k0 = tile / column_tiles % k_tiles * kTile;
    const int64_t group = tile / (column_tiles * k_tiles);
    // This thread loads one output k and one column (tap, channel) of every fourth place.
    const int64_t k = k0 + threadIdx.x % kTile, j = j0 + threadIdx.x % kTile;
    const int64_t c = j % z.c_group(), s = j / z.c_group() % z.s, r = j / (z.c_group() * z.s);
    A sum[4][4] = {};
    for (int64_t at = begin; at < end; at += kDeep) {
#pragma unroll
      for (int i = 0; i < kDeep / 4; i++) {
        const int d = threadIdx.x / kTile + 4 * i;
        const int64_t place = at + d, q = place % z.q, p = place / z.q % z.p, n = place / (z.q * z.p);
        const int64_t row = p * z.rows.stride - z.rows.padding + r * z.rows.dilation;
        const int64_t column = q * z.columns.stride - z.columns.padding + s * z.columns.dilation;
        const bool in = place < end && j < columns && row >= 0 && row < z.h && column >= 0 && column < z.w;
        left[d][threadIdx.x % kTile] =
            place < end && k < z.k_group() ? static_cast<A>(gradient[place * z.k + group * z.k_group() + k]) : A{0};
        right[d][threadIdx.x % kTile] =
            in ? static_cast<A>(x[((n * z.h + row) * z.w + column) * z.c + group * z.c_group() + c]) : A{0};
      }
      __syncthreads();
      multiply_tile(left, right, sum);
      __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
      for (int l = 0; l < 4; l++) {
        const int64_t row = k0 + threadIdx.x / 16 * 4 + i, column = j0 + threadIdx.x % 16 * 4 + l;
        if (row >= z.k_group() || column >= columns) continue;
        out[(blockIdx.y * z.k + group * z.k_group() + row) * columns + column] = sum[i][l];
      }
    }
  }
}

// out[i] = the sum of the parts' i and of the bias of channel i % channels. Each thread adds W values of every G-th
// part; G such sums are added in a fixed order. A kernel of a chain.
template <int W, int G, class T>
__global__ void __launch_bounds__(256)
    add_parts_kernel(const arithmetic_t<T>* __restrict__ parts, const T* __restrict__ bias, T* __restrict__ out,
                     int64_t size, int64_t count, int64_t channels) {
  using A = arithmetic_t<T>;
  constexpr int kAcross = 256 / G;
  __shared__ Vector<A, W> shared[G][kAcross];
  wait_for_previous();
  let_next_begin();
  const int lane = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  for (int64_t base = blockIdx.x * int64_t{kAcross} * W; base < size; base += int64_t{kAcross} * W * gridDim.x) {
    const int64_t i = base + lane * W;
    Vector<A, W> sum{};
    if (i < size) {
#pragma unroll 4
      for (int64_t part = group; part < count; part += G) {
        const Vector<A, W> more = load_vector<A, W>(parts + part * size + i);
#pragma unroll
        for (int j = 0; j < W; j++) sum.values[j] += more.values[j];
      }
    }
    shared[group][lane] = sum;
    __syncthreads();
    if (group == 0 && i < size) {
      Vector<T, W> rounded;
#pragma unroll
      for (int j = 0; j < W; j++) {
        A total = bias == nullptr ? A{0} : static_cast<A>(bias[(i + j) % channels]);
#pragma unroll
        for (int g = 0; g < G; g++) total += shared[g][lane].values[j];
        rounded.values[j] = static_cast<T>(total);
      }
      store_vector(out + i, rounded);
    }
    __syncthreads();
  }
}

}  // namespace cog_rwkv

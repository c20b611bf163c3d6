// conv2d for the half precisions on tensor cores, where the channels of a group are multiples of 8.
#pragma once

#include "conv2d.h"
#include "tensor_core.cuh"

namespace cog_rwkv {

// Division of numbers below 2^31 by a fixed one, without a division.
struct Divisor {
  uint32_t by, factor, shift;

  explicit Divisor(int64_t value) : by(static_cast<uint32_t>(value)), factor(0), shift(0) {
    if (by == 1) return;
    while ((uint64_t{1} << shift) < by) shift++;  // 2^(shift - 1) < by <= 2^shift
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
    shift--;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const {
    return by == 1 ? x : __umulhi(x, factor) >> shift;
  }
};

// A grid of places n, y, x, numbered.
struct Grid {
  Divisor rows, columns;

  __device__ __forceinline__ void split(uint32_t place, int& n, int& y, int& x) const {
    const uint32_t line = columns(place);
    n = static_cast<int>(rows(line));
    x = static_cast<int>(place - line * columns.by);
    y = static_cast<int>(line - n * rows.by);
  }
};

// A block computes S::height places times S::width channels of a group.
template <class T, class S, int STAGES, bool transposed, bool hopper>
__global__ void __launch_bounds__(S::threads) half_gather_kernel(Gather<T> a, Grid grid, int width_tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const int o0 = static_cast<int>(blockIdx.x % width_tiles) * S::width, group = blockIdx.y;
  const uint32_t place0 = blockIdx.x / width_tiles * S::height, places = static_cast<uint32_t>(a.places());
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8;  // what this thread copies: of every 32nd line one piece
  const int64_t in_c = a.groups * a.depth;
  const int depth = static_cast<int>(a.depth), width = static_cast<int>(a.width), deep_steps = (depth + 63) / 64;

  constexpr int kLines = S::height / 32;
  const T* pixel[kLines];
  int row[kLines], column[kLines];
#pragma unroll
  for (int i = 0; i < kLines; i++) {
    const uint32_t place = place0 + line + 32 * i;
    int n, y, x;
    grid.split(place < places ? place : 0, n, y, x);
    row[i] = place < places ? y * a.h.step + a.h.first : -(1 << 29);  // beyond any image
    column[i] = x * a.w.step + a.w.first;
    pixel[i] =
        a.in + ((int64_t{n} * a.h.in_size + row[i]) * a.w.in_size + column[i]) * in_c + group * a.depth + piece * 8;
    if (place >= places) pixel[i] = a.in;
  }

  // The next step to load: tap (ti, tj), channels from d0 on.
  int ti = 0, tj = 0, d0 = 0;
  const auto load = [&](uint32_t stage, int) {
    const int dy = ti * a.h.tap_step, dx = tj * a.w.tap_step;
    const int64_t shift = (int64_t{dy} * a.w.in_size + dx) * in_c + d0;
    const bool deep = d0 + piece * 8 < depth;
#pragma unroll
    for (int i = 0; i < kLines; i++) {
      const bool in = deep && static_cast<unsigned>(row[i] + dy) < static_cast<unsigned>(a.h.in_size) &&
                      static_cast<unsigned>(column[i] + dx) < static_cast<unsigned>(a.w.in_size);
      copy16(stage + swizzled(line + 32 * i, piece), in ? pixel[i] + shift : a.in, in);
    }
    const int r = a.h.weight_first + ti * a.h.weight_step, s = a.w.weight_first + tj * a.w.weight_step;
    const uint32_t right = stage + S::height * 128;
    if constexpr (!transposed) {  // lines are outputs
      const T* from = a.weight + a.weight_at(group, d0 + piece * 8, o0 + line, r, s);
      const int64_t next = int64_t{32} * a.h.kernel * a.w.kernel * depth;
#pragma unroll
      for (int i = 0; i < S::width / 32; i++) {
        const bool in = deep && o0 + line + 32 * i < width;
        copy16(right + swizzled(line + 32 * i, piece), in ? from + i * next : a.weight, in);
      }
    } else {  // lines are terms
      const T* from = a.weight + a.weight_at(group, d0 + line, o0 + piece * 8, r, s);
      const int64_t next = int64_t{32} * a.h.kernel * a.w.kernel * width;
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int block = 0; block < S::width / 64; block++) {
          const bool in = d0 + line + 32 * i < depth && o0 + block * 64 + piece * 8 < width;
          copy16(right + block * kBlockBytes + swizzled(line + 32 * i, piece),
                 in ? from + i * next + block * 64 : a.weight, in);
        }
      }
    }
    d0 += 64;
    if (d0 < depth) return;
    d0 = 0;
    tj = tj + 1 == a.w.taps ? 0 : tj + 1;
    ti += tj == 0;
  };

  float sum[S::M][S::N / 2] = {};
  multiply_steps<T, S, STAGES, false, transposed, hopper>(sum, shared, a.h.taps * a.w.taps * deep_steps, load);

  // Through shared memory, so that rows are written in 16-byte pieces. Each warp has 16 lines of its own.
  copies_arrived<0>();
  __syncthreads();
  constexpr int kPitch = S::N + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* mine = reinterpret_cast<T*>(memory + (shared - shared_address(memory))) + warp * 16 * kPitch;
  const int first_row = (S::ROWS == 2 ? warp / 4 * 64 * S::M : 0) + warp % 4 * 16;
  const int first_column = o0 + (S::ROWS == 2 ? 0 : warp / 4 * S::N);
#pragma unroll
  for (int i = 0; i < S::M; i++) {
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
      const int c = j * 8 + lane % 4 * 2, o = first_column + c;
      const bool biased = a.bias != nullptr && o < width;
      const float b0 = biased ? static_cast<float>(a.bias[group * a.width + o]) : 0.0f;
      const float b1 = biased ? static_cast<float>(a.bias[group * a.width + o + 1]) : 0.0f;
      const float* d = sum[i] + j * 4;
      T* to = mine + lane / 4 * kPitch + c;
      *reinterpret_cast<Vector<T, 2>*>(to) = {static_cast<T>(d[0] + b0), static_cast<T>(d[1] + b1)};
      *reinterpret_cast<Vector<T, 2>*>(to + 8 * kPitch) = {static_cast<T>(d[2] + b0), static_cast<T>(d[3] + b1)};
    }
    __syncwarp();
#pragma unroll
    for (int k = lane; k < 16 * S::N / 8; k += 32) {
      const int r = k / (S::N / 8), c = k % (S::N / 8) * 8;
      const uint32_t place = place0 + first_row + i * 64 + r;
      if (place >= places || first_column + c >= width) continue;
      int n, y, x;
      grid.split(place, n, y, x);
      const int64_t at = (int64_t{n} * a.h.out_size + y * a.h.out_step + a.h.out_first) * a.w.out_size +
                         x * a.w.out_step + a.w.out_first;
      store_vector(a.out + (at * a.groups + group) * a.width + first_column + c,
                   load_vector<T, 8>(mine + r * kPitch + c));
    }
    __syncwarp();
  }
}

// The gradient of the weight. A block computes S::height outputs k times S::width columns (tap, channel), of blocks of
// 64 channels of one tap, over blockIdx.z's part of the places: out [parts][K][R S C / groups] in float.
template <class T, class S, int STAGES, bool hopper>
__global__ void __launch_bounds__(S::threads)
    half_weight_kernel(const T* __restrict__ gradient, const T* __restrict__ x, float* __restrict__ out, ConvSizes z,
                       Grid grid, int column_tiles, int part_steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const int k_group = static_cast<int>(z.k_group()), c_group = static_cast<int>(z.c_group());
  const int k0 = static_cast<int>(blockIdx.x / column_tiles) * S::height, group = blockIdx.y;
  const int block0 = static_cast<int>(blockIdx.x % column_tiles) * (S::width / 64), tap_blocks = (c_group + 63) / 64;
  const int h = static_cast<int>(z.h), w = static_cast<int>(z.w), s_size = static_cast<int>(z.s);
  const int taps = static_cast<int>(z.r * z.s), piece = threadIdx.x % 8, line = threadIdx.x / 8;
  const uint32_t places = static_cast<uint32_t>(z.n * z.p * z.q);
  const uint32_t begin = blockIdx.z * static_cast<uint32_t>(part_steps) * 64;

  constexpr int kBlocks = S::width / 64;
  int dy[kBlocks], dx[kBlocks], channel[kBlocks];  // of each block of columns
#pragma unroll
  for (int b = 0; b < kBlocks; b++) {
    const int tap = (block0 + b) / tap_blocks, c = (block0 + b) % tap_blocks * 64 + piece * 8;
    dy[b] = tap / s_size * static_cast<int>(z.rows.dilation) - static_cast<int>(z.rows.padding);
    dx[b] = tap % s_size * static_cast<int>(z.columns.dilation) - static_cast<int>(z.columns.padding);
    if (tap >= taps || c >= c_group) dy[b] = -(1 << 29);  // beyond any image
    channel[b] = group * c_group + c;
  }
  const auto load = [&](uint32_t stage, int step) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int l = line + 32 * i;
      const uint32_t place = begin + step * 64 + l;
      const bool real = place < places;
      int n, p, q;
      grid.split(real ? place : 0, n, p, q);
      const T* from = gradient + static_cast<int64_t>(real ? place : 0) * z.k + group * k_group + k0 + piece * 8;
#pragma unroll
      for (int b = 0; b < S::height / 64; b++) {
        const bool in = real && k0 + b * 64 + piece * 8 < k_group;
        copy16(stage + b * kBlockBytes + swizzled(l, piece), in ? from + b * 64 : gradient, in);
      }
      const int row = p * static_cast<int>(z.rows.stride), column = q * static_cast<int>(z.columns.stride);
      const uint32_t right = stage + S::height * 128;
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const bool in = real && static_cast<unsigned>(row + dy[b]) < static_cast<unsigned>(h) &&
                        static_cast<unsigned>(column + dx[b]) < static_cast<unsigned>(w);
        const int64_t at = (int64_t{n} * h + row + dy[b]) * w + column + dx[b];
        copy16(right + b * kBlockBytes + swizzled(l, piece), in ? x + at * z.c + channel[b] : x, in);
      }
    }
  };

  const int steps_left = static_cast<int>((places + 63) / 64) - static_cast<int>(blockIdx.z) * part_steps;
  float sum[S::M][S::N / 2] = {};
  multiply_steps<T, S, STAGES, true, true, hopper>(sum, shared, min(part_steps, steps_left), load);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = k0 + (S::ROWS == 2 ? warp / 4 * 64 * S::M : 0) + warp % 4 * 16 + lane / 4;
  const int first_block = block0 + (S::ROWS == 2 ? 0 : warp / 4 * S::N / 64);
#pragma unroll
  for (int i = 0; i < S::M; i++) {
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
      const int block = first_block + j / 8, tap = block / tap_blocks;
      const int c = block % tap_blocks * 64 + j % 8 * 8 + lane % 4 * 2;
      if (tap >= taps || c >= c_group) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = first_row + i * 64 + half * 8;
        if (k >= k_group) continue;
        float* to = out + ((static_cast<int64_t>(blockIdx.z) * z.k + group * k_group + k) * taps + tap) * c_group + c;
        store_vector(to, Vector<float, 2>{sum[i][j * 4 + half * 2], sum[i][j * 4 + half * 2 + 1]});
      }
    }
  }
}

}  // namespace cog_rwkv

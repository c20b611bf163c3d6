// conv2d for the half precisions on tensor cores, where the channels of a group are multiples of 8.
#pragma once

#include "conv2d.h"
#include "tensor_core.cuh"
#include "wide_plan.h"

namespace cog_rwkv {

// Division of numbers below 2^31 by a fixed one, without a division.
struct Divisor {
  uint32_t by = 1, factor = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t value) : by(static_cast<uint32_t>(value)) {
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

// Gathers that write different places of one result: those of a gradient with a stride, in one launch.
struct Gathers {
  int count = 0;
  Axis h[kMostGathers], w[kMostGathers];
  Grid grid[kMostGathers];
  uint32_t places[kMostGathers], first_tile[kMostGathers + 1] = {};
};

// What a block of either kernel has of its result, from the sums of its 8 warps: places from place0 on, channels from
// o0 on. `tiles` is shared memory that nobody uses any more.
template <class T, class S>
__device__ __forceinline__ void write_places(const Gather<T>& a, const Axis& ah, const Axis& aw, const Grid& grid,
                                             uint32_t places, uint32_t place0, int o0, int group,
                                             const float (&sum)[S::N / 2], unsigned char* tiles, float* room) {
  const int width = static_cast<int>(a.width);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = (S::ROWS == 2 ? warp / 4 * 64 : 0) + warp % 4 * 16;
  const int first_column = o0 + (S::ROWS == 2 ? 0 : warp / 4 * S::N);
  // Where the channels of a place begin in the result; -1 beyond the last.
  const auto result_at = [&](uint32_t place) {
    if (place >= places) return int64_t{-1};
    int n, y, x;
    grid.split(place, n, y, x);
    const int64_t line_at = int64_t{n} * ah.out_size + y * ah.out_step + ah.out_first;
    return ((line_at * aw.out_size + x * aw.out_step + aw.out_first) * a.groups + group) * a.width;
  };
  if (gridDim.z > 1) {
    const int64_t size = a.images * ah.out_size * aw.out_size * a.groups * a.width;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t at = result_at(place0 + first_row + lane / 4 + 8 * half);
#pragma unroll
      for (int j = 0; j < S::N / 8; j++) {
        const int o = first_column + j * 8 + lane % 4 * 2;
        if (at < 0 || o >= width) continue;
        store_vector(room + blockIdx.z * size + at + o,
                     Vector<float, 2>{sum[j * 4 + half * 2], sum[j * 4 + half * 2 + 1]});
      }
    }
    return;
  }

  // Through shared memory, so that rows are written in 16-byte pieces. Each warp has 16 lines of its own.
  constexpr int kPitch = S::N + 8;
  T* mine = reinterpret_cast<T*>(tiles) + warp * 16 * kPitch;
#pragma unroll
  for (int j = 0; j < S::N / 8; j++) {
    const int c = j * 8 + lane % 4 * 2, o = first_column + c;
    const bool biased = a.bias != nullptr && o < width;
    const float b0 = biased ? static_cast<float>(a.bias[group * a.width + o]) : 0.0f;
    const float b1 = biased ? static_cast<float>(a.bias[group * a.width + o + 1]) : 0.0f;
    const float* d = sum + j * 4;
    T* to = mine + lane / 4 * kPitch + c;
    *reinterpret_cast<Vector<T, 2>*>(to) = {static_cast<T>(d[0] + b0), static_cast<T>(d[1] + b1)};
    *reinterpret_cast<Vector<T, 2>*>(to + 8 * kPitch) = {static_cast<T>(d[2] + b0), static_cast<T>(d[3] + b1)};
  }
  __syncwarp();
#pragma unroll
  for (int k = lane; k < 16 * S::N / 8; k += 32) {
    const int r = k / (S::N / 8), c = k % (S::N / 8) * 8;
    const int64_t at = result_at(place0 + first_row + r);
    if (at < 0 || first_column + c >= width) continue;
    store_vector(a.out + at + first_column + c, load_vector<T, 8>(mine + r * kPitch + c));
  }
}

// Likewise of the gradient of the weight: outputs from k0 on, blocks of 64 columns from block0 on.
template <class T, class S>
__device__ __forceinline__ void write_weights(const ConvSizes& z, int k0, int block0, int group,
                                              const float (&sum)[S::N / 2], T* out, float* room) {
  const int k_group = static_cast<int>(z.k_group()), c_group = static_cast<int>(z.c_group());
  const int taps = static_cast<int>(z.r * z.s), tap_blocks = (c_group + 63) / 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = k0 + (S::ROWS == 2 ? warp / 4 * 64 : 0) + warp % 4 * 16 + lane / 4;
  const int first_block = block0 + (S::ROWS == 2 ? 0 : warp / 4 * S::N / 64);
#pragma unroll
  for (int j = 0; j < S::N / 8; j++) {
    const int block = first_block + j / 8, tap = block / tap_blocks;
    const int c = block % tap_blocks * 64 + j % 8 * 8 + lane % 4 * 2;
    if (tap >= taps || c >= c_group) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int k = first_row + half * 8;
      if (k >= k_group) continue;
      const int64_t at = ((static_cast<int64_t>(blockIdx.z) * z.k + group * k_group + k) * taps + tap) * c_group + c;
      const float first = sum[j * 4 + half * 2], second = sum[j * 4 + half * 2 + 1];
      if (gridDim.z > 1) {
        store_vector(room + at, Vector<float, 2>{first, second});
      } else {
        store_vector(out + at, Vector<T, 2>{static_cast<T>(first), static_cast<T>(second)});
      }
    }
  }
}

// A block computes S::height places times S::width channels of a group, over blockIdx.z's part of the terms. With one
// part it writes a.out, else [parts][size of out] in float to `room`.
template <class T, class S, bool transposed>
__global__ void __launch_bounds__(S::threads, S::BLOCKS)
    half_gather_kernel(Gather<T> a, const __grid_constant__ Gathers gathers, int width_tiles,
                       float* __restrict__ room) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t row_tile = blockIdx.x / width_tiles;
  int g = 0;
  while (g + 1 < gathers.count && row_tile >= gathers.first_tile[g + 1]) g++;
  const Axis& ah = gathers.h[g];
  const Axis& aw = gathers.w[g];
  const Grid& grid = gathers.grid[g];
  const uint32_t place0 = (row_tile - gathers.first_tile[g]) * S::height, places = gathers.places[g];
  const int o0 = static_cast<int>(blockIdx.x % width_tiles) * S::width, group = blockIdx.y;
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8;  // what this thread copies: of every 32nd line one piece
  const int64_t in_c = a.groups * a.depth;
  const int depth = static_cast<int>(a.depth), width = static_cast<int>(a.width);
  const int in_h = ah.in_size, in_w = aw.in_size, h_taps = ah.taps, w_taps = aw.taps;

  constexpr int kLines = S::height / 32;
  const T* pixel[kLines];
  int row[kLines], column[kLines];
#pragma unroll
  for (int i = 0; i < kLines; i++) {
    const uint32_t place = place0 + line + 32 * i;
    const bool real = place < places;
    int n, y, x;
    grid.split(real ? place : 0, n, y, x);
    row[i] = real ? y * ah.step + ah.first : -(1 << 29);  // beyond any image
    column[i] = x * aw.step + aw.first;
    const int64_t at = (int64_t{n} * in_h + (real ? row[i] : 0)) * in_w + column[i];
    pixel[i] = a.in + at * in_c + group * a.depth + piece * 8;
  }

  // Of 64 channels all taps, then the next 64: taps read much the same pixels.
  const int taps = h_taps * w_taps, all_steps = taps * ((depth + 63) / 64);
  const int part_steps = (all_steps + static_cast<int>(gridDim.z) - 1) / static_cast<int>(gridDim.z);
  const int begin = static_cast<int>(blockIdx.z) * part_steps, steps = max(0, min(part_steps, all_steps - begin));
  int d0 = taps == 0 ? 0 : begin / taps * 64, ti = taps == 0 ? 0 : begin % taps / w_taps;  // the next step to load
  int tj = taps == 0 ? 0 : begin % taps % w_taps;
  const auto load = [&](uint32_t stage, int) {
    const int dy = ti * ah.tap_step, dx = tj * aw.tap_step;
    const int64_t shift = (int64_t{dy} * in_w + dx) * in_c + d0;
    const bool deep = d0 + piece * 8 < depth;
#pragma unroll
    for (int i = 0; i < kLines; i++) {
      const bool in = deep && static_cast<unsigned>(row[i] + dy) < static_cast<unsigned>(in_h) &&
                      static_cast<unsigned>(column[i] + dx) < static_cast<unsigned>(in_w);
      copy16<true>(stage + swizzled(line + 32 * i, piece), in ? pixel[i] + shift : a.in, in);
    }
    const int r = ah.weight_first + ti * ah.weight_step, s = aw.weight_first + tj * aw.weight_step;
    const uint32_t right = stage + S::height * 128;
    if constexpr (!transposed) {  // lines are outputs
      const T* from = a.weight + a.weight_at(group, d0 + piece * 8, o0 + line, r, s);
      const int64_t next = int64_t{32} * ah.kernel * aw.kernel * depth;
#pragma unroll
      for (int i = 0; i < S::width / 32; i++) {
        const bool in = deep && o0 + line + 32 * i < width;
        copy16(right + swizzled(line + 32 * i, piece), in ? from + i * next : a.weight, in);
      }
    } else {  // lines are terms
      const T* from = a.weight + a.weight_at(group, d0 + line, o0 + piece * 8, r, s);
      const int64_t next = int64_t{32} * ah.kernel * aw.kernel * width;
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
    tj = tj + 1 == w_taps ? 0 : tj + 1;
    if (tj == 0) ti = ti + 1 == h_taps ? 0 : ti + 1;
    if (tj == 0 && ti == 0) d0 += 64;
  };

  float sum[S::N / 2] = {};
  multiply_steps<T, S, false, transposed>(sum, shared, steps, load);

  write_places<T, S>(a, ah, aw, grid, places, place0, o0, group, sum, memory + (shared - shared_address(memory)), room);
}

// The gradient of the weight. A block computes S::height outputs k times S::width columns (tap, channel), of blocks of
// 64 channels of one tap, over blockIdx.z's part of the places: [K][R S C / groups], or with several parts
// [parts][K][R S C / groups] in float.
template <class T, class S>
__global__ void __launch_bounds__(S::threads, S::BLOCKS)
    half_weight_kernel(const T* __restrict__ gradient, const T* __restrict__ x, T* __restrict__ out,
                       float* __restrict__ room, ConvSizes z, Grid grid, int column_tiles, int part_steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const int k_group = static_cast<int>(z.k_group()), c_group = static_cast<int>(z.c_group());
  const int k0 = static_cast<int>(blockIdx.x / column_tiles) * S::height, group = blockIdx.y;
  const int block0 = static_cast<int>(blockIdx.x % column_tiles) * (S::width / 64), tap_blocks = (c_group + 63) / 64;
  const int h = static_cast<int>(z.h), w = static_cast<int>(z.w), s_size = static_cast<int>(z.s);
  const int taps = static_cast<int>(z.r * z.s), piece = threadIdx.x % 8, line = threadIdx.x / 8;
  const int y_step = static_cast<int>(z.rows.stride), x_step = static_cast<int>(z.columns.stride);
  const int64_t z_c = z.c, z_k = z.k;
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
      const T* from = gradient + static_cast<int64_t>(real ? place : 0) * z_k + group * k_group + k0 + piece * 8;
#pragma unroll
      for (int b = 0; b < S::height / 64; b++) {
        const bool in = real && k0 + b * 64 + piece * 8 < k_group;
        copy16(stage + b * kBlockBytes + swizzled(l, piece), in ? from + b * 64 : gradient, in);
      }
      const int row = p * y_step, column = q * x_step;
      const uint32_t right = stage + S::height * 128;
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const bool in = real && static_cast<unsigned>(row + dy[b]) < static_cast<unsigned>(h) &&
                        static_cast<unsigned>(column + dx[b]) < static_cast<unsigned>(w);
        const int64_t at = (int64_t{n} * h + row + dy[b]) * w + column + dx[b];
        copy16(right + b * kBlockBytes + swizzled(l, piece), in ? x + at * z_c + channel[b] : x, in);
      }
    }
  };

  const int steps_left = static_cast<int>((places + 63) / 64) - static_cast<int>(blockIdx.z) * part_steps;
  float sum[S::N / 2] = {};
  multiply_steps<T, S, true, true>(sum, shared, min(part_steps, steps_left), load);

  write_weights<T, S>(z, k0, block0, group, sum, out, room);
}

}  // namespace cog_rwkv

// conv2d for the half precisions on Hopper: the kernels of half.cuh, with wgmma and with tiles copied by TMA.
#pragma once

#include "../csrc/tma.cuh"
#include "half.cuh"

namespace cog_rwkv {

#if COG_RWKV_WGMMA
// Of the 9 warps of a block, one loads: load(stage address, barrier, step) for each step, STAGES steps ahead at most.
// The other eight add up the products; they return with the sums, and all are done with the shared memory.
template <class T, class S, bool left_wide, bool right_wide, class Load>
__device__ __forceinline__ bool multiply_copied(float (&sum)[S::N / 2], uint32_t shared, int steps, const Load& load) {
  const uint32_t full = shared + S::STAGES * S::bytes, empty = full + 8 * S::STAGES;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::STAGES; stage++) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (warp == 8) {
    if (threadIdx.x % 32 == 0) {
      for (int step = 0; step < steps; step++) {
        const int stage = step % S::STAGES, turn = step / S::STAGES;
        if (turn > 0) barrier_wait(empty + 8 * stage, (turn - 1) & 1);
        barrier_expect(full + 8 * stage, S::bytes);
        load(shared + stage * S::bytes, full + 8 * stage, step);
      }
    }
    return false;
  }
  const int group = warp / 4, row = S::ROWS == 2 ? group * 64 : 0, column = S::ROWS == 2 ? 0 : group * S::N;
  for (int step = 0; step < steps; step++) {
    const int stage = step % S::STAGES;
    const uint32_t left = shared + stage * S::bytes, right = left + S::height * 128;
    barrier_wait(full + 8 * stage, step / S::STAGES & 1);
    start_wgmma<T, S::N, left_wide, right_wide>(sum, left, row, right, column);
    if (step == 0) continue;
    wait_wgmma<1>();  // the step before has been read
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * ((step - 1) % S::STAGES));
  }
  wait_wgmma<0>();
  sums_ready(sum);
  asm volatile("bar.sync 1, 256;" ::: "memory");
  return true;
}
#endif

// Of each gather of a launch: its pixels, where the first tap is, and how far on the others are.
struct GatherMaps {
  CUtensorMap pixels[kMostGathers], weight;
  int first_y[kMostGathers], first_x[kMostGathers];
};

template <class T, class S, bool transposed>
__global__ void __launch_bounds__(S::threads, S::BLOCKS)
    hopper_gather_kernel(Gather<T> a, const __grid_constant__ Gathers gathers, const __grid_constant__ GatherMaps maps,
                         int width_tiles, float* __restrict__ room) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t row_tile = blockIdx.x / width_tiles;
  int g = 0;
  while (g + 1 < gathers.count && row_tile >= gathers.first_tile[g + 1]) g++;
  const Axis& ah = gathers.h[g];
  const Axis& aw = gathers.w[g];
  const uint32_t place0 = (row_tile - gathers.first_tile[g]) * S::height;
  const int o0 = static_cast<int>(blockIdx.x % width_tiles) * S::width, group = blockIdx.y;
  const int depth = static_cast<int>(a.depth), width = static_cast<int>(a.width);

  const int w_taps = aw.taps, taps = ah.taps * w_taps, all_steps = taps * ((depth + 63) / 64);
  const int part_steps = (all_steps + static_cast<int>(gridDim.z) - 1) / static_cast<int>(gridDim.z);
  const int begin = static_cast<int>(blockIdx.z) * part_steps, steps = max(0, min(part_steps, all_steps - begin));
  int n, y, x;
  gathers.grid[g].split(place0, n, y, x);
  y = y * ah.step + maps.first_y[g];
  x = x * aw.step + maps.first_x[g];
  int d0 = taps == 0 ? 0 : begin / taps * 64, tap = taps == 0 ? 0 : begin % taps;  // the next step to load
  const auto load = [&](uint32_t stage, uint32_t barrier, int) {
    const int ti = tap / w_taps, tj = tap % w_taps;
    // Offsets count from the tap that is furthest up and left.
    const int down = ah.tap_step > 0 ? ti * ah.tap_step : (ti + 1 - ah.taps) * ah.tap_step;
    const int right = aw.tap_step > 0 ? tj * aw.tap_step : (tj + 1 - w_taps) * aw.tap_step;
    load_image(stage, maps.pixels[g], barrier, group * depth + d0, x, y, n, right, down);
    const int r = ah.weight_first + ti * ah.weight_step, s = aw.weight_first + tj * aw.weight_step;
    const uint32_t matrix = stage + S::height * 128;
    if constexpr (!transposed) {
      load_matrix(matrix, maps.weight, barrier, d0, r * aw.kernel + s, group * width + o0);
    } else {
#pragma unroll
      for (int block = 0; block < S::width / 64; block++) {
        load_matrix(matrix + block * kBlockBytes, maps.weight, barrier, o0 + block * 64, r * aw.kernel + s,
                    group * depth + d0);
      }
    }
    tap = tap + 1 == taps ? 0 : tap + 1;
    if (tap == 0) d0 += 64;
  };

  float sum[S::N / 2] = {};
  if (!multiply_copied<T, S, false, transposed>(sum, shared, steps, load)) return;
  write_places<T, S>(a, ah, aw, gathers.grid[g], gathers.places[g], place0, o0, group, sum,
                     memory + (shared - shared_address(memory)), room);
#endif
}

template <class T, class S>
__global__ void __launch_bounds__(S::threads, S::BLOCKS)
    hopper_weight_kernel(const __grid_constant__ CUtensorMap gradient, const __grid_constant__ CUtensorMap pixels,
                         T* __restrict__ out, float* __restrict__ room, ConvSizes z, Grid grid, int column_tiles,
                         int part_steps) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
  const int k_group = static_cast<int>(z.k_group()), c_group = static_cast<int>(z.c_group());
  const int k0 = static_cast<int>(blockIdx.x / column_tiles) * S::height, group = blockIdx.y;
  const int block0 = static_cast<int>(blockIdx.x % column_tiles) * (S::width / 64), tap_blocks = (c_group + 63) / 64;
  const int taps = static_cast<int>(z.r * z.s), s_size = static_cast<int>(z.s);
  const int y_step = static_cast<int>(z.rows.stride), x_step = static_cast<int>(z.columns.stride);
  const int up = static_cast<int>(z.rows.padding), left = static_cast<int>(z.columns.padding);
  const int y_next = static_cast<int>(z.rows.dilation), x_next = static_cast<int>(z.columns.dilation);
  const int begin = static_cast<int>(blockIdx.z) * part_steps;
  const int all_steps = static_cast<int>((z.n * z.p * z.q + 63) / 64);
  const auto load = [&](uint32_t stage, uint32_t barrier, int step) {
    const int place = (begin + step) * 64;
    int n, y, x;
    grid.split(place, n, y, x);
#pragma unroll
    for (int b = 0; b < S::height / 64; b++) {
      load_matrix(stage + b * kBlockBytes, gradient, barrier, group * k_group + k0 + b * 64, place, 0);
    }
#pragma unroll
    for (int b = 0; b < S::width / 64; b++) {
      const int tap = min((block0 + b) / tap_blocks, taps - 1), c = (block0 + b) % tap_blocks * 64;
      load_image(stage + (S::height / 64 + b) * kBlockBytes, pixels, barrier, group * c_group + c, x * x_step - left,
                 y * y_step - up, n, tap % s_size * x_next, tap / s_size * y_next);
    }
  };

  float sum[S::N / 2] = {};
  if (!multiply_copied<T, S, true, true>(sum, shared, min(part_steps, all_steps - begin), load)) return;
  write_weights<T, S>(z, k0, block0, group, sum, out, room);
#endif
}

}  // namespace cog_rwkv

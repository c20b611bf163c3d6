// conv2d for the half precisions on Hopper: TMA copies tiles into shared memory, wgmma multiplies them.
//
// The blocks are those of csrc/products_wide.cuh: some warps copy, up to STAGES steps of 64 terms ahead and from one
// tile to the next, two groups of four warps multiply and write. Of a gather, the rows of a tile are channels of the
// result and its tokens are places: what a tap of 64 channels reads of them is one copy, which puts zeros where it
// leaves the image. Of the gradient of the weight, rows are columns (tap, channel), tokens are outputs, terms are
// places.
#pragma once

#include "half.cuh"
#include "wide_join.cuh"

namespace cog_rwkv {

// ---- gathers

struct WideGather {
  Axis h, w;
  Divisor taps, w_taps;  // by the taps of both axes, and of one line
  Grid grid;
  uint32_t places, steps;
  int first_y, first_x;  // where the tap that is furthest up and left reads for place 0
  bool plain, packed;    // place i reads pixel i alone; place i is pixel i of the result
};

// The argument of a kernel.
template <class T>
struct WideGathers {
  CUtensorMap weight, pixels[kMostGathers];
  WideGather jobs[kMostGathers];
  ConvPlan plan;
  T* out;
  const T* bias;  // or null
  float* room;    // [slices][size], where there are any
  int64_t size;
  int depth, width;
};

struct WideWeight {
  CUtensorMap pixels, gradient;
  ConvPlan plan;
  void* out;
  float* room;
  int64_t size;
  Divisor tap_blocks, w_taps;  // by the blocks of 64 channels of a tap, and the taps of a line
  Grid grid;
  uint32_t steps;
  int k_group, c_group, taps;
  int y_step, x_step, up, left, y_next, x_next;
  bool plain;  // place i reads pixel i alone
};

#if COG_RWKV_WGMMA

// What one tile of a gather is copied from.
template <class T, class S, bool transposed>
struct GatherSource {
  const WideGathers<T>& list;
  const WideGather& job;
  const ConvPlace place;
  int n[S::COPIES], y[S::COPIES], x[S::COPIES], token[S::COPIES];

  __device__ __forceinline__ GatherSource(const WideGathers<T>& all, const ConvPlace& at)
      : list(all), job(all.jobs[at.job]), place(at) {
#pragma unroll
    for (int i = 0; i < S::COPIES; i++) {
      const uint32_t first = min(place.token + i * S::COPY, job.places - 1);  // what is beyond is not written
      token[i] = static_cast<int>(first);
      job.grid.split(first, n[i], y[i], x[i]);
      y[i] = y[i] * job.h.step + job.first_y;
      x[i] = x[i] * job.w.step + job.first_x;
    }
  }

  __device__ __forceinline__ uint32_t steps() const { return job.steps; }

  // Of 64 channels all taps, then the next 64: taps read much the same pixels.
  __device__ __forceinline__ void copy(uint32_t to, uint32_t barrier, uint32_t step) const {
    const int block = static_cast<int>(job.taps(step)),
              tap = static_cast<int>(step) - block * static_cast<int>(job.taps.by);
    const int ti = static_cast<int>(job.w_taps(tap)), tj = tap - ti * job.w.taps, d = block * kLine;
    const int group = static_cast<int>(place.group), row = static_cast<int>(place.row);
    // Offsets count from the tap that is furthest up and left.
    const int down = job.h.tap_step > 0 ? ti * job.h.tap_step : (ti + 1 - job.h.taps) * job.h.tap_step;
    const int right = job.w.tap_step > 0 ? tj * job.w.tap_step : (tj + 1 - job.w.taps) * job.w.tap_step;
#pragma unroll
    for (int i = 0; i < S::COPIES; i++) {
      const uint32_t pixels = to + S::weights + i * S::COPY * 128;
      if (job.plain) {
        load_matrix(pixels, list.pixels[place.job], barrier, group * list.depth + d, token[i], 0);
      } else {
        load_image(pixels, list.pixels[place.job], barrier, group * list.depth + d, x[i], y[i], n[i], right, down);
      }
    }
    const int r = job.h.weight_first + ti * job.h.weight_step, s = job.w.weight_first + tj * job.w.weight_step;
    const int matrix = r * job.w.kernel + s;
    if constexpr (transposed) {
#pragma unroll
      for (int b = 0; b < S::ROWS / 64; b++) {
        load_matrix(to + b * kBlockBytes, list.weight, barrier, row + b * 64, matrix, group * list.depth + d);
      }
    } else {
      load_matrix(to, list.weight, barrier, d, matrix, group * list.width + row);
    }
  }
};

// Where in the result a row and a token of a tile are, to be added; -1 where they are nowhere.
template <class T>
struct GatherTarget {
  const WideGathers<T>& list;
  const WideGather& job;
  const ConvPlace place;

  __device__ __forceinline__ GatherTarget(const WideGathers<T>& all, const ConvPlace& at)
      : list(all), job(all.jobs[at.job]), place(at) {}

  __device__ __forceinline__ uint32_t steps() const { return job.steps; }
  __device__ __forceinline__ int64_t row_at(int row) const {
    const int o = static_cast<int>(place.row) + row;
    return o < list.width ? int64_t{place.group} * list.width + o : -1;
  }
  __device__ __forceinline__ int64_t token_at(int token) const {
    const uint32_t at = place.token + token;
    if (at >= job.places) return -1;
    const int64_t channels = int64_t{list.plan.groups} * list.width;
    if (job.packed) return at * channels;
    int n, y, x;
    job.grid.split(at, n, y, x);
    const int64_t line = int64_t{n} * job.h.out_size + y * job.h.out_step + job.h.out_first;
    return (line * job.w.out_size + x * job.w.out_step + job.w.out_first) * channels;
  }
  __device__ __forceinline__ float bias_at(int row) const {
    const int64_t at = row_at(row);
    return list.bias == nullptr || at < 0 ? 0.0f : static_cast<float>(list.bias[at]);
  }
  __device__ __forceinline__ bool biased() const { return list.bias != nullptr; }
};

// ---- the gradient of the weight

template <class S>
struct WeightSource {
  const WideWeight& list;
  const ConvPlace place;
  int c[S::ROWS / 64], right[S::ROWS / 64], down[S::ROWS / 64];  // of each block of columns

  __device__ __forceinline__ WeightSource(const WideWeight& all, const ConvPlace& at) : list(all), place(at) {
    const int blocks = list.taps * static_cast<int>(list.tap_blocks.by);
#pragma unroll
    for (int b = 0; b < S::ROWS / 64; b++) {
      const int block = min(static_cast<int>(place.row / 64) + b, blocks - 1);  // what is beyond is not written
      const int tap = static_cast<int>(list.tap_blocks(block)), ti = static_cast<int>(list.w_taps(tap));
      c[b] =
          static_cast<int>(place.group) * list.c_group + (block - tap * static_cast<int>(list.tap_blocks.by)) * kLine;
      down[b] = ti * list.y_next;
      right[b] = (tap - ti * static_cast<int>(list.w_taps.by)) * list.x_next;
    }
  }

  __device__ __forceinline__ uint32_t steps() const { return list.steps; }

  __device__ __forceinline__ void copy(uint32_t to, uint32_t barrier, uint32_t step) const {
    const int first = static_cast<int>(step) * kLine;
    int n, y, x;
    list.grid.split(first, n, y, x);
    y = y * list.y_step - list.up;
    x = x * list.x_step - list.left;
#pragma unroll
    for (int b = 0; b < S::ROWS / 64; b++) {
      if (list.plain) {
        load_matrix(to + b * kBlockBytes, list.pixels, barrier, c[b], first, 0);
      } else {
        load_image(to + b * kBlockBytes, list.pixels, barrier, c[b], x, y, n, right[b], down[b]);
      }
    }
    const int k = static_cast<int>(place.group) * list.k_group + static_cast<int>(place.token);
#pragma unroll
    for (int b = 0; b < S::TOKENS / 64; b++) {
      load_matrix(to + S::weights + b * kBlockBytes, list.gradient, barrier, k + b * 64, first, 0);
    }
  }
};

struct WeightTarget {
  const WideWeight& list;
  const ConvPlace place;

  __device__ __forceinline__ WeightTarget(const WideWeight& all, const ConvPlace& at) : list(all), place(at) {}

  __device__ __forceinline__ uint32_t steps() const { return list.steps; }
  __device__ __forceinline__ int64_t row_at(int row) const {
    const int block = (static_cast<int>(place.row) + row) / 64, tap = static_cast<int>(list.tap_blocks(block));
    const int c = (block - tap * static_cast<int>(list.tap_blocks.by)) * kLine + row % 64;
    return tap < list.taps && c < list.c_group ? int64_t{tap} * list.c_group + c : -1;
  }
  __device__ __forceinline__ int64_t token_at(int token) const {
    const int k = static_cast<int>(place.token) + token;
    if (k >= list.k_group) return -1;
    return (int64_t{place.group} * list.k_group + k) * list.taps * list.c_group;
  }
  __device__ __forceinline__ bool biased() const { return false; }
  __device__ __forceinline__ float bias_at(int) const { return 0.0f; }
};

// ---- what both have in common

// One thread of each of kCopyWarps warps copies whatever this block multiplies, these in turns, step by step: one alone
// takes longer to find out what to copy than the tensor cores take for a small tile.
template <class S, class Source, class List>
__device__ __forceinline__ void copy_units(const List& list, const WideMemory<S>& memory, uint32_t warp) {
  // A warp has seen that what was STAGES steps before its last step is done, which is further on than two rounds ago.
  static_assert(S::STAGES >= kCopyWarps);
  RingPlace<S> at;
  uint32_t turn = 0;
  for (uint32_t unit = blockIdx.x; unit < list.plan.units(); unit += gridDim.x) {
    const Source source(list, place_of(list.plan, unit));
    const RowRange steps = part_of_steps(source.steps(), source.place.part, list.plan.parts);
    for (uint32_t step = steps.begin; step < steps.end; step++, at.go_on()) {
      if (turn == warp) {
        if (at.round > 0) barrier_wait(memory.empty(at.stage), (at.round - 1) & 1);
        barrier_expect(memory.full(at.stage), S::stage);
        source.copy(memory.stage(at.stage), memory.full(at.stage), step);
      }
      turn = turn + 1 == kCopyWarps ? 0 : turn + 1;
    }
  }
}

// The first row of block b of this thread's group, and the group's first token, in the tile.
template <class S>
__device__ __forceinline__ int first_row(int b) {
  return S::halves ? 0 : (static_cast<int>(threadIdx.x / 128) * S::BLOCKS + b) * 64;
}
template <class S>
__device__ __forceinline__ int first_token() {
  return S::halves ? static_cast<int>(threadIdx.x / 128) * S::N : 0;
}

template <class S, class Target>
__device__ __forceinline__ void add_bias(float (&sums)[S::BLOCKS][S::N / 2], const Target& target) {
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float bias = target.bias_at(first_row<S>(b) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + half * 8);
#pragma unroll
      for (int j = 2 * half; j < S::N / 2; j += 4) sums[b][j] += bias, sums[b][j + 1] += bias;
    }
  }
}

__device__ __forceinline__ void store_offset(uint32_t to, int64_t offset) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(offset) : "memory");
}
__device__ __forceinline__ int64_t load_offset(uint32_t from) {
  int64_t offset;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(offset) : "r"(from) : "memory");
  return offset;
}

// Notes for a group where its tokens are in the result.
template <class S, class Target>
__device__ __forceinline__ void note_tokens(const Target& target, uint32_t table) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int t = thread; t < S::N; t += 128) store_offset(table + t * 8, target.token_at(first_token<S>() + t));
  group_barrier(threadIdx.x / 128);
}

// Writes a tile as it is, in pieces of 32 bytes.
template <class S, class Target>
__device__ __forceinline__ void write_sums(const float (&sums)[S::BLOCKS][S::N / 2], const Target& target,
                                           uint32_t table, float* room) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const uint32_t tokens = table + threadIdx.x % 4 * 16;
  int64_t rows[S::BLOCKS * 2];
#pragma unroll
  for (int i = 0; i < S::BLOCKS * 2; i++) rows[i] = target.row_at(first_row<S>(i / 2) + row + i % 2 * 8);
#pragma unroll
  for (int j = 0; j < S::N / 4; j++) {  // two tokens of each 8
    const int64_t token = load_offset(tokens + (j / 2 * 8 + j % 2) * 8);
    if (token < 0) continue;
#pragma unroll
    for (int i = 0; i < S::BLOCKS * 2; i++) {
      if (rows[i] >= 0) room[rows[i] + token] = sums[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2];
    }
  }
}

// Writes a tile rounded: 32 tokens by 64 rows at a time, in whole lines of 128 bytes.
// `turn`: which of its two pieces of memory a group uses next.
template <class T, class S, class Target>
__device__ __forceinline__ void write_rounded(const float (&sums)[S::BLOCKS][S::N / 2], const WideMemory<S>& memory,
                                              const Target& target, uint32_t table, T* out, uint32_t& turn) {
  const int thread = threadIdx.x % 128, lane = thread % 32, group = threadIdx.x / 128;
  const int line = lane / 16 * 8 + lane % 8, piece = thread / 32 * 2 + lane / 8 % 2;  // that this lane stores
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    const int64_t row = target.row_at(first_row<S>(b) + thread % 8 * 8);
#pragma unroll
    for (int t = 0; t < S::N; t += 32) {
      const uint32_t mine = memory.turn(group, turn);
      turn ^= 1;
#pragma unroll
      for (int u = t; u < t + 32 && u < S::N; u += 16) {
        uint32_t halves[4];  // rows 0 to 7 and 8 to 15 of this warp, of 8 tokens; and of the next 8
#pragma unroll
        for (int i = 0; i < 4; i++) {
          halves[i] = two_halves(T{}, sums[b][u / 2 + 2 * i], sums[b][u / 2 + 2 * i + 1]);
        }
        store_matrices(mine + swizzled(u - t + line, piece), halves);
      }
      group_barrier(group);
#pragma unroll
      for (int u = t; u < t + 32 && u < S::N; u += 16) {
        const int64_t token = load_offset(table + (u + thread / 8) * 8);
        const Piece eight = shared_piece(mine + swizzled(u - t + thread / 8, thread % 8));
        if (row >= 0 && token >= 0) *reinterpret_cast<Piece*>(out + row + token) = eight;
      }
    }
  }
}

template <class T, class S, bool left_wide, bool right_wide, class Target, class List>
__device__ __forceinline__ void multiply_units(const List& list, const WideMemory<S>& memory) {
  RingPlace<S> at;
  uint32_t turn = 0, table = memory.full(0) + S::barriers + threadIdx.x / 128 * 2 * S::table, next = S::table;
  for (uint32_t unit = blockIdx.x; unit < list.plan.units(); unit += gridDim.x) {
    const Target target(list, place_of(list.plan, unit));
    const RowRange steps = part_of_steps(target.steps(), target.place.part, list.plan.parts);
    note_tokens<S>(target, table);
    float sums[S::BLOCKS][S::N / 2];
    multiply_tile<T, S, left_wide, right_wide, S::N>(sums, memory, steps.end - steps.begin, at);
    if (list.plan.joined && !join_parts<S>(sums, memory, target.place.part)) return;
    if (list.plan.slices() > 0) {
      write_sums<S>(sums, target, table, list.room + target.place.part * list.size);
    } else {
      if (target.biased()) add_bias<S>(sums, target);
      write_rounded<T, S>(sums, memory, target, table, static_cast<T*>(list.out), turn);
    }
    table += next;  // some of the group still read this one
    next = -next;
  }
}

template <class T, class S, bool left_wide, bool right_wide, class Source, class Target, class List>
__device__ __forceinline__ void convolve(const List& list) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const WideMemory<S> memory{(shared_address(bytes) + 1023) & ~1023u};
  init_mail(memory);
  init_barriers(memory);
  if (list.plan.joined) {
    begin_greeting();
    end_greeting();
  }
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x >= kSumThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0) - kSumThreads / 32;
    if (warp < kCopyWarps && elected()) copy_units<S, Source>(list, memory, warp);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_units<T, S, left_wide, right_wide, Target>(list, memory);
    if (list.plan.joined) {  // a block that sends must find the other one there; racecheck knows it by this alone
      begin_greeting();
      end_greeting();
    }
  }
}
#endif

template <class T, class S, bool transposed>
__global__ void __launch_bounds__(kWideThreads, 1) wide_gather_kernel(const __grid_constant__ WideGathers<T> list) {
#if COG_RWKV_WGMMA
  if (threadIdx.x == kSumThreads) {
    prefetch_map(list.weight);
    if (list.jobs[0].steps > 0) prefetch_map(list.pixels[0]);
  }
  convolve<T, S, transposed, false, GatherSource<T, S, transposed>, GatherTarget<T>>(list);
#endif
}

template <class T, class S>
__global__ void __launch_bounds__(kWideThreads, 1) wide_weight_kernel(const __grid_constant__ WideWeight list) {
#if COG_RWKV_WGMMA
  if (threadIdx.x == kSumThreads) {
    prefetch_map(list.pixels);
    prefetch_map(list.gradient);
  }
  convolve<T, S, true, true, WeightSource<S>, WeightTarget>(list);
#endif
}

}  // namespace cog_rwkv

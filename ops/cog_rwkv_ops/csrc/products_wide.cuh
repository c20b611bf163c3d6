// Products on Hopper: TMA copies tiles into shared memory, wgmma multiplies them.
//
// A weight's rows are the rows of a tile, tokens its columns: so n need not fill anything up. One warp of a block
// copies, STAGES steps of 64 terms ahead, from one tile to the next; two groups of four warps multiply, each half of
// the rows, or of the steps where a tile has 64 rows, and write while copies go on. Blocks walk through the units of
// all products of a group (wide_plan.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "products_kernels.cuh"
#include "tma.cuh"
#include "wide_plan.h"

namespace cog_rwkv {

static_assert(kMostJobs == kMaxProducts);

constexpr int kSumThreads = 256,
              kWideThreads = kSumThreads + 128;  // those that multiply, and the group of one that copies
// Shared memory of a block that has a multiprocessor to itself; of one that leaves room for blocks of the norms and the
// heads before and after it; of one of two; and what is asked for where a second one shall not fit.
constexpr uint32_t kWholeBytes = 227 * 1024, kBesideBytes = 162 * 1024, kSmallBytes = 104 * 1024,
                   kAloneBytes = 116 * 1024;

// The argument of a kernel. Weights of [m, k], or of [k, m] where they are transposed.
struct WideList {
  CUtensorMap weights[kMaxProducts], tokens[kMaxProducts];
  Product jobs[kMaxProducts];
  WidePlan plan;
  int n;
};

// `small`, for few tokens: so that two blocks fit a multiprocessor.
template <int ROWS_, int TOKENS_, bool small = false>
struct WideShape {
  static constexpr int ROWS = ROWS_, TOKENS = TOKENS_;
  static constexpr bool shared_rows = ROWS == 64;              // the groups take the same rows, every other step each
  static constexpr int BLOCKS = shared_rows ? 1 : ROWS / 128;  // blocks of 64 rows, of a group
  static constexpr bool light = shared_rows;                   // few registers, so that other blocks have room beside
  static constexpr uint32_t weights = ROWS * 128, stage = weights + TOKENS * 128;
  static constexpr uint32_t turn = (TOKENS < 32 ? TOKENS : 32) * 128;  // so many tokens by 64 rows, on their way out
  static constexpr uint32_t turns = 4 * turn, barriers = 256;
  static constexpr uint32_t whole = small ? kSmallBytes : light ? kBesideBytes : kWholeBytes, most = light ? 14 : 10;
  static constexpr uint32_t room = (whole - 1024 - turns - barriers) / stage, fit = room < most ? room : most;
  // A stage stays with one of the groups that take turns: the other might take its first filling for the second.
  static constexpr uint32_t STAGES = shared_rows ? fit / 2 * 2 : fit;
  static constexpr uint32_t bytes = 1024 + STAGES * stage + turns + barriers;  // tiles begin on a multiple of 1024
  static_assert((light || !small) && 16 * STAGES <= barriers);
  static_assert(STAGES >= 3 && (ROWS % 128 == 0 || (shared_rows && TOKENS <= 32)) && TOKENS % 16 == 0);
};

// Where things are in the shared memory of a block.
template <class S>
struct WideMemory {
  uint32_t begin;

  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return begin + i * S::stage; }
  __device__ __forceinline__ uint32_t turn(uint32_t group, uint32_t i) const {
    return stage(S::STAGES) + (group * 2 + i) * S::turn;
  }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return turn(2, 0) + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(S::STAGES) + 8 * i; }
};

// Where a thread is in the ring of stages.
template <class S>
struct RingPlace {
  uint32_t stage = 0, round = 0;

  __device__ __forceinline__ void go_on() {
    stage++;
    if (stage == S::STAGES) stage = 0, round++;
  }
};

#if COG_RWKV_WGMMA

template <class S>
__device__ __forceinline__ void init_barriers(const WideMemory<S>& memory) {
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < S::STAGES; i++) {
      barrier_init(memory.full(i), 1);
      barrier_init(memory.empty(i), kSumThreads / 32 / (S::shared_rows ? 2 : 1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_copies();
  }
  __syncthreads();
}

// ---- the warp that copies

template <class S, bool transposed>
__device__ __forceinline__ void copy_weights(const WideList& list, const WideMemory<S>& memory, const WidePlace& place,
                                             uint32_t stage, uint32_t step) {
  const int term = static_cast<int>(step * kStepTerms), row = static_cast<int>(place.row);
  const CUtensorMap& map = list.weights[place.job];
  if constexpr (transposed) {
#pragma unroll
    for (int block = 0; block < S::ROWS / 64; block++) {
      load_matrix(memory.stage(stage) + block * kBlockBytes, map, memory.full(stage), row + block * 64, 0, term);
    }
  } else {
    load_matrix(memory.stage(stage), map, memory.full(stage), term, 0, row);
  }
}

template <class S>
__device__ __forceinline__ void copy_tokens(const WideList& list, const WideMemory<S>& memory, const WidePlace& place,
                                            uint32_t stage, uint32_t step) {
  load_matrix(memory.stage(stage) + S::weights, list.tokens[place.job], memory.full(stage),
              static_cast<int>(step * kStepTerms), 0, static_cast<int>(place.token));
}

// One thread copies whatever this block multiplies. Weights are there before the kernel ahead has ended.
template <class S, bool transposed>
__device__ __forceinline__ void copy_units(const WideList& list, const WideMemory<S>& memory) {
  const WidePlan& plan = list.plan;
  RingPlace<S> at;
  for (uint32_t unit = blockIdx.x; unit < plan.first[kMaxProducts]; unit += gridDim.x) {
    const WidePlace place = place_of(plan, unit);
    const RowRange steps = steps_of_part(static_cast<uint32_t>(list.jobs[place.job].k), place.part, plan.parts);
    uint32_t step = steps.begin;
    if (unit == blockIdx.x) {
      const uint32_t ahead = min(steps.end - steps.begin, S::STAGES);
      prefetch_map(list.tokens[place.job]);
      for (uint32_t i = 0; i < ahead; i++) {
        barrier_expect(memory.full(i), S::stage);
        copy_weights<S, transposed>(list, memory, place, i, step + i);
      }
      wait_for_previous();
      for (uint32_t i = 0; i < ahead; i++, step++, at.go_on()) copy_tokens(list, memory, place, i, step);
    }
    for (; step < steps.end; step++, at.go_on()) {
      if (at.round > 0) barrier_wait(memory.empty(at.stage), (at.round - 1) & 1);
      barrier_expect(memory.full(at.stage), S::stage);
      copy_weights<S, transposed>(list, memory, place, at.stage, step);
      copy_tokens(list, memory, place, at.stage, step);
    }
  }
}

// ---- the warps that multiply

template <class S>
__device__ __forceinline__ void give_back(const WideMemory<S>& memory, uint32_t stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty(stage));
}

// sums = a tile's products over `steps` steps. Where N is less than the tile's tokens, the groups take the same rows
// and N tokens each. `wide_tokens`: tokens lie as transposed weights do.
template <class T, class S, bool transposed, bool wide_tokens = false, int N = S::TOKENS>
__device__ __forceinline__ void multiply_tile(float (&sums)[S::BLOCKS][N / 2], const WideMemory<S>& memory,
                                              uint32_t steps, RingPlace<S>& at) {
  constexpr bool shared_tokens = N == S::TOKENS;
  const uint32_t group = threadIdx.x / 128;
  const uint32_t first = S::shared_rows || !shared_tokens ? 0 : group * S::BLOCKS * kBlockBytes;
  const uint32_t first_token = shared_tokens ? 0 : group * N * 128;
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int j = 0; j < N / 2; j++) sums[b][j] = 0.0f;
  }
  uint32_t before = S::STAGES;  // the stage of the step before
  // Loops that pass over the steps of the other group would keep the compiler from having two products under way.
  const uint32_t skipped = S::shared_rows ? group : 0;
  if (skipped > 0) at.go_on();
  for (uint32_t step = skipped; step < steps; step += S::shared_rows ? 2 : 1) {
    const uint32_t left = memory.stage(at.stage) + first, right = memory.stage(at.stage) + S::weights + first_token;
    barrier_wait(memory.full(at.stage), at.round & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLine / 16; k++) {
      const uint64_t tokens = descriptor(right + k * kSixteenTerms<wide_tokens>);
#pragma unroll
      for (int b = 0; b < S::BLOCKS; b++) {
        const uint32_t weights = left + b * kBlockBytes + k * kSixteenTerms<transposed>;
        wgmma<T, N, transposed, wide_tokens>(sums[b], descriptor(weights), tokens);
      }
    }
    wgmma_commit();
    if (before < S::STAGES) {
      wait_wgmma<1>();  // the step before has been read
      give_back(memory, before);
    }
    before = at.stage;
    at.go_on();
    if (S::shared_rows && step + 1 < steps) at.go_on();
  }
  wait_wgmma<0>();
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) sums_ready(sums[b]);
  if (before < S::STAGES) give_back(memory, before);
}

__device__ __forceinline__ uint32_t two_halves(Half, float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ __forceinline__ uint32_t two_halves(BFloat16, float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// Four matrices of 8 x 8, each stored with its columns as lines of 16 bytes: lane l has the address of line l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The four warps of a group.
__device__ __forceinline__ void group_barrier(int group) {
  if (group == 0) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  }
}

// Of sums[b][j] of a thread: the row and the token in the tile.
template <class S>
__device__ __forceinline__ int row_of(int b, int j) {
  const int group = S::shared_rows ? 0 : threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  return (group * S::BLOCKS + b) * 64 + warp * 16 + threadIdx.x % 32 / 4 + j / 2 % 2 * 8;
}
__device__ __forceinline__ int token_of(int j) { return j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2; }

template <class S, class F>
__device__ __forceinline__ void for_each_sum(float (&sums)[S::BLOCKS][S::TOKENS / 2], F f) {
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) sums[b][j] = f(sums[b][j]);
  }
}

// Bias and function. The functions are as exact as what is added up: errors of 1e-6.
template <class S>
__device__ __forceinline__ void end_sums(float (&sums)[S::BLOCKS][S::TOKENS / 2], const Product& job, int row0) {
  if (job.bias != nullptr) {
#pragma unroll
    for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = row0 + row_of<S>(b, 2 * half);
        const float bias = row < job.m ? job.bias[row] : 0.0f;
#pragma unroll
        for (int j = 2 * half; j < S::TOKENS / 2; j += 4) sums[b][j] += bias, sums[b][j + 1] += bias;
      }
    }
  }
  switch (job.f) {
    case Epilogue::tanh:
      return for_each_sum<S>(sums, [](float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); });
    case Epilogue::sigmoid:
      return for_each_sum<S>(sums, [](float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); });
    case Epilogue::squared_relu:
      return for_each_sum<S>(sums, [](float x) { return x <= 0.0f ? 0.0f : x * x; });  // NaN stays
    default:
      return;
  }
}

// Writes a tile as it is, in pieces of 32 bytes.
template <class S>
__device__ __forceinline__ void write_floats(const float (&sums)[S::BLOCKS][S::TOKENS / 2], const Product& job, int n,
                                             int row0, int token0, uint32_t part) {
  float* const out = static_cast<float*>(job.out) + part * int64_t{n} * job.m;
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) {
      const int token = token0 + token_of(j), row = row0 + row_of<S>(b, j);
      if (token < n && row < job.m) out[token * job.m + row] = sums[b][j];
    }
  }
}

// Writes a tile rounded: 32 tokens by 64 rows at a time, in whole lines of 128 bytes.
// `turn`: which of its two pieces of memory a group uses next.
template <class T, class S>
__device__ __forceinline__ void write_tile(const float (&sums)[S::BLOCKS][S::TOKENS / 2], const WideMemory<S>& memory,
                                           const Product& job, int n, int row0, int token0, uint32_t& turn) {
  const int thread = threadIdx.x % 128, lane = thread % 32, group = threadIdx.x / 128;
  const int line = lane / 16 * 8 + lane % 8, piece = thread / 32 * 2 + lane / 8 % 2;  // that this lane stores
  T* const out = static_cast<T*>(job.out);
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    const int row = row0 + (group * S::BLOCKS + b) * 64 + thread % 8 * 8;
#pragma unroll
    for (int t = 0; t < S::TOKENS; t += 32) {
      const uint32_t mine = memory.turn(group, turn);
      turn ^= 1;
#pragma unroll
      for (int u = t; u < t + 32 && u < S::TOKENS; u += 16) {
        uint32_t halves[4];  // rows 0 to 7 and 8 to 15 of this warp, of 8 tokens; and of the next 8
#pragma unroll
        for (int i = 0; i < 4; i++) {
          halves[i] = two_halves(T{}, sums[b][u / 2 + 2 * i], sums[b][u / 2 + 2 * i + 1]);
        }
        store_matrices(mine + swizzled(u - t + line, piece), halves);
      }
      group_barrier(group);
#pragma unroll
      for (int u = t; u < t + 32 && u < S::TOKENS; u += 16) {
        const int token = token0 + u + thread / 8;
        const Piece eight = shared_piece(mine + swizzled(u - t + thread / 8, thread % 8));
        if (token < n && row < job.m) *reinterpret_cast<Piece*>(out + token * job.m + row) = eight;
      }
    }
  }
}

// Where the groups take the same rows: the first adds the sums of the second to its own.
template <class S>
__device__ __forceinline__ void join_groups(float (&sums)[S::BLOCKS][S::TOKENS / 2], const WideMemory<S>& memory) {
  const uint32_t mine = memory.turn(1, 0) + threadIdx.x % 128 * 4;
  if (threadIdx.x >= 128) {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + j * 512), "f"(sums[0][j]) : "memory");
    }
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  if (threadIdx.x < 128) {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) {
      float other;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(mine + j * 512) : "memory");
      sums[0][j] += other;
    }
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

template <class T, class S, bool transposed>
__device__ __forceinline__ void multiply_units(const WideList& list, const WideMemory<S>& memory) {
  const WidePlan& plan = list.plan;
  RingPlace<S> at;
  uint32_t turn = 0;
  for (uint32_t unit = blockIdx.x; unit < plan.first[kMaxProducts]; unit += gridDim.x) {
    const WidePlace place = place_of(plan, unit);
    const Product& job = list.jobs[place.job];
    const RowRange steps = steps_of_part(static_cast<uint32_t>(job.k), place.part, plan.parts);
    const int row0 = static_cast<int>(place.row), token0 = static_cast<int>(place.token);
    float sums[S::BLOCKS][S::TOKENS / 2];
    multiply_tile<T, S, transposed>(sums, memory, steps.end - steps.begin, at);
    if constexpr (S::shared_rows) {
      join_groups<S>(sums, memory);
      if (threadIdx.x >= 128) continue;
    }
    end_sums<S>(sums, job, row0);
    if (job.float_out) {
      write_floats<S>(sums, job, list.n, row0, token0, place.part);
    } else {
      write_tile<T, S>(sums, memory, job, list.n, row0, token0, turn);
    }
  }
}
#endif

template <class T, class S, bool transposed>
__global__ void __launch_bounds__(kWideThreads, S::light ? 2 : 1) wide_kernel(const __grid_constant__ WideList list) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(1024) unsigned char bytes[];
  const WideMemory<S> memory{(shared_address(bytes) + 1023) & ~1023u};
  init_barriers(memory);
  if (threadIdx.x >= kSumThreads) {
    if (!S::light) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == kSumThreads / 32 && elected()) copy_units<S, transposed>(list, memory);
    __syncwarp();
  } else {
    if (!S::light) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous();
    let_next_begin();
    multiply_units<T, S, transposed>(list, memory);
  }
#endif
}

}  // namespace cog_rwkv

// Products of many tokens on Hopper: TMA copies tiles into shared memory, wgmma multiplies them.
//
// A weight's rows are the rows of a tile, tokens its columns: so n need not fill anything up. One warp of a block
// copies, STAGES steps of 64 terms ahead, from one tile to the next; two groups of four warps multiply, each half of
// the rows. Blocks walk through the units of all products of a group (wide_plan.h). In a cluster a block copies its
// part of what several need into the shared memory of all of them, so that L2 is read once.
//
// A tile that several blocks share, or whose end is more than a rounding, ends in the memory of the stages, when those
// are empty: "at leisure". Else the groups write it through some memory of their own while copies go on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cluster.cuh"
#include "products_kernels.cuh"
#include "tma.cuh"
#include "wide_plan.h"

namespace cog_rwkv {

static_assert(kMostJobs == kMaxProducts);

constexpr int kSumThreads = 256,
              kWideThreads = kSumThreads + 128;  // those that multiply, and the group of one that copies
constexpr uint32_t kTurnBytes = 32 * 128;        // 32 tokens by 64 rows, on their way out

// The argument of a kernel. Weights of [m, k], or of [k, m] where they are transposed.
struct WideList {
  CUtensorMap weights[kMaxProducts], tokens[kMaxProducts];
  Product jobs[kMaxProducts];
  WidePlan plan;
  int n;
};

template <int ROWS_, int TOKENS_>
struct WideShape {
  static constexpr int ROWS = ROWS_, TOKENS = TOKENS_, BLOCKS = ROWS / 128;  // blocks of 64 rows, of a warp group
  static constexpr uint32_t weights = ROWS * 128, stage = weights + TOKENS * 128;
  static constexpr uint32_t turns = 4 * kTurnBytes, barriers = 256, whole = 227 * 1024;
  static constexpr uint32_t room = (whole - 1024 - turns - barriers) / stage, STAGES = room < 8 ? room : 8;
  static constexpr uint32_t bytes = 1024 + STAGES * stage + turns + barriers;  // tiles begin on a multiple of 1024
  static_assert(STAGES >= 3 && ROWS * TOKENS * 4 <= STAGES * stage && ROWS % 128 == 0 && TOKENS % 16 == 0);
};

// Where things are in the shared memory of a block.
template <class S>
struct WideMemory {
  uint32_t begin;

  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return begin + i * S::stage; }
  __device__ __forceinline__ uint32_t turn(uint32_t group, uint32_t i) const {
    return stage(S::STAGES) + (group * 2 + i) * kTurnBytes;
  }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return turn(2, 0) + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(S::STAGES) + 8 * i; }
  __device__ __forceinline__ uint32_t ready() const { return empty(S::STAGES); }  // all sums of a tile at leisure
  __device__ __forceinline__ uint32_t read() const { return ready() + 8; }        // and all are done with them
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

__device__ __forceinline__ bool at_leisure(const WidePlan& plan, const Product& job) {
  const bool simple = job.f == Epilogue::none || job.f == Epilogue::squared_relu;
  return plan.team.parts > 1 || job.float_out || job.bias != nullptr || !simple;
}

#if COG_RWKV_WGMMA

template <class S>
__device__ __forceinline__ void init_barriers(const WideMemory<S>& memory, const WideTeam& team) {
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < S::STAGES; i++) {
      barrier_init(memory.full(i), 1);
      barrier_init(memory.empty(i), 8 * (team.rows + team.tokens - 1));  // the warps that multiply what a block copies
    }
    barrier_init(memory.ready(), 8 * team.blocks());
    barrier_init(memory.read(), 8 * team.blocks());
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_copies();
  }
  cluster_arrive(team.blocks());
  cluster_wait(team.blocks());
}

// ---- the warp that copies

// The copies of one block: its own tile's, or its parts of what others need as well.
template <class S, bool transposed>
class WideCopies {
 public:
  __device__ WideCopies(const WideList& list, const WideMemory<S>& memory, const WideRank& me)
      : list_(list), memory_(memory), me_(me) {
    const WideTeam& team = list.plan.team;
    for (uint32_t i = 0; i < team.tokens; i++) same_rows_ |= 1u << me.block(team, me.row, i, me.part);
    for (uint32_t i = 0; i < team.rows; i++) same_tokens_ |= 1u << me.block(team, i, me.token, me.part);
  }

  __device__ __forceinline__ void go_to(const WidePlace& unit) {
    const WidePlan& plan = list_.plan;
    job_ = unit.job;
    row_ = static_cast<int>(unit.row + me_.row * S::ROWS);
    token_ = static_cast<int>(unit.token + me_.token * S::TOKENS);
    steps_ = steps_of_part(static_cast<uint32_t>(list_.jobs[job_].k), me_.part, plan.team.parts);
  }
  __device__ __forceinline__ uint32_t steps() const { return steps_.end - steps_.begin; }

  __device__ __forceinline__ void weights(uint32_t stage, uint32_t step) const {
    const int term = static_cast<int>((steps_.begin + step) * kStepTerms);
    const uint32_t sharers = list_.plan.team.tokens, to = memory_.stage(stage);
    const CUtensorMap& map = list_.weights[job_];
    if constexpr (transposed) {
      const uint32_t each = S::ROWS / 64 / sharers;
      for (uint32_t block = me_.token * each; block < (me_.token + 1) * each; block++) {
        copy(sharers, same_rows_, to + block * kBlockBytes, map, stage, row_ + static_cast<int>(block) * 64, term);
      }
    } else {
      const uint32_t first = me_.token * (S::ROWS / sharers);
      copy(sharers, same_rows_, to + first * 128, map, stage, term, row_ + static_cast<int>(first));
    }
  }

  __device__ __forceinline__ void tokens(uint32_t stage, uint32_t step) const {
    const int term = static_cast<int>((steps_.begin + step) * kStepTerms);
    const uint32_t sharers = list_.plan.team.rows, first = me_.row * (S::TOKENS / sharers);
    copy(sharers, same_tokens_, memory_.stage(stage) + S::weights + first * 128, list_.tokens[job_], stage, term,
         token_ + static_cast<int>(first));
  }

 private:
  __device__ __forceinline__ void copy(uint32_t sharers, uint32_t blocks, uint32_t to, const CUtensorMap& map,
                                       uint32_t stage, int across, int down) const {
    if (sharers == 1) {
      load_matrix(to, map, memory_.full(stage), across, 0, down);
    } else {
      load_matrix_for(static_cast<uint16_t>(blocks), to, map, memory_.full(stage), across, 0, down);
    }
  }

  const WideList& list_;
  const WideMemory<S> memory_;
  const WideRank me_;
  uint32_t same_rows_ = 0, same_tokens_ = 0;  // the blocks of the cluster, a bit each
  uint32_t job_ = 0;
  int row_ = 0, token_ = 0;
  RowRange steps_{0, 0};
};

// One thread copies whatever this block multiplies. Weights are there before the kernel ahead has ended.
template <class S, bool transposed>
__device__ __forceinline__ void copy_units(const WideList& list, const WideMemory<S>& memory, const WideRank& me,
                                           uint32_t cluster, uint32_t clusters) {
  const WidePlan& plan = list.plan;
  WideCopies<S, transposed> copies(list, memory, me);
  RingPlace<S> at;
  uint32_t leisure = 0;
  for (uint32_t unit = cluster; unit < plan.first[kMaxProducts]; unit += clusters) {
    const WidePlace place = place_of(plan, unit);
    copies.go_to(place);
    uint32_t step = 0;
    if (unit == cluster) {
      const uint32_t ahead = min(copies.steps(), S::STAGES);
      for (uint32_t i = 0; i < ahead; i++) {
        barrier_expect(memory.full(i), S::stage);
        copies.weights(i, i);
      }
      wait_for_previous();
      for (; step < ahead; step++, at.go_on()) copies.tokens(step, step);
    }
    for (; step < copies.steps(); step++, at.go_on()) {
      if (at.round > 0) barrier_wait(memory.empty(at.stage), (at.round - 1) & 1);
      barrier_expect(memory.full(at.stage), S::stage);
      copies.weights(at.stage, step);
      copies.tokens(at.stage, step);
    }
    if (at_leisure(plan, list.jobs[place.job])) {
      barrier_wait(memory.read(), leisure++ & 1);
      fence_copies();
    }
  }
}

// ---- the warps that multiply

// Gives stages back: to the blocks that copy into this one's memory, those of its rows and those of its tokens. A lane
// of every warp each.
template <class S>
class GiveBack {
 public:
  __device__ GiveBack(const WideMemory<S>& memory, const WideTeam& team, const WideRank& me) {
    const uint32_t lane = threadIdx.x % 32, i = lane - team.rows;
    gives_ = lane < team.rows + team.tokens - 1;
    const uint32_t block = lane < team.rows ? me.block(team, lane, me.token, me.part)
                                            : me.block(team, me.row, i < me.token ? i : i + 1, me.part);
    if (gives_) empty_ = address_in_block(memory.empty(0), block);
  }
  __device__ __forceinline__ void operator()(uint32_t stage) const {
    if (gives_) barrier_arrive_there(empty_ + 8 * stage);
  }

 private:
  bool gives_;
  uint32_t empty_ = 0;  // the first barrier there
};

// sums = a tile's products over `steps` steps.
template <class T, class S, bool transposed>
__device__ __forceinline__ void multiply_tile(float (&sums)[S::BLOCKS][S::TOKENS / 2], const WideMemory<S>& memory,
                                              const GiveBack<S>& give_back, uint32_t steps, RingPlace<S>& at) {
  const uint32_t first = threadIdx.x / 128 * S::BLOCKS * kBlockBytes;
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) sums[b][j] = 0.0f;
  }
  uint32_t before = 0;
  for (uint32_t step = 0; step < steps; step++) {
    const uint32_t left = memory.stage(at.stage) + first, right = memory.stage(at.stage) + S::weights;
    barrier_wait(memory.full(at.stage), at.round & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLine / 16; k++) {
      const uint64_t tokens = descriptor(right + k * kSixteenTerms<false>);
#pragma unroll
      for (int b = 0; b < S::BLOCKS; b++) {
        const uint32_t weights = left + b * kBlockBytes + k * kSixteenTerms<transposed>;
        wgmma<T, S::TOKENS, transposed, false>(sums[b], descriptor(weights), tokens);
      }
    }
    wgmma_commit();
    if (step > 0) {
      wait_wgmma<1>();  // the step before has been read
      give_back(before);
    }
    before = at.stage;
    at.go_on();
  }
  wait_wgmma<0>();
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) sums_ready(sums[b]);
  if (steps > 0) give_back(before);
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

// Writes a tile of a simple end while copies go on: 32 tokens by 64 rows at a time, in whole lines of 128 bytes.
// `turn`: which of its two pieces of memory a group uses next.
template <class T, class S>
__device__ __forceinline__ void write_tile(const float (&sums)[S::BLOCKS][S::TOKENS / 2], const WideMemory<S>& memory,
                                           const Product& job, int n, int row0, int token0, uint32_t& turn) {
  const int thread = threadIdx.x % 128, lane = thread % 32, group = threadIdx.x / 128;
  const int line = lane / 16 * 8 + lane % 8, piece = thread / 32 * 2 + lane / 8 % 2;  // that this lane stores
  const bool square = job.f == Epilogue::squared_relu;
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
          float low = sums[b][u / 2 + 2 * i], high = sums[b][u / 2 + 2 * i + 1];
          if (square) low = apply(Epilogue::squared_relu, low), high = apply(Epilogue::squared_relu, high);
          halves[i] = two_halves(T{}, low, high);
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

// Where a value is in the memory of the stages, in floats: that of one token after the other. The rows of a warp's
// lanes would meet in a bank.
template <class S>
__device__ __forceinline__ uint32_t leisure_at(int row, int token) {
  return token * S::ROWS + (row ^ (token / 2 % 4 * 8));
}

// Writes a tile at leisure: the blocks that share it put their sums into shared memory; each adds them up, in the
// order of the terms, for some of the tokens, and ends them.
template <class T, class S>
__device__ __forceinline__ void share_tile(const float (&sums)[S::BLOCKS][S::TOKENS / 2], const WideMemory<S>& memory,
                                           const WideTeam& team, const WideRank& me, const Product& job, int n,
                                           int row0, int token0, uint32_t parity) {
  const uint32_t lane = threadIdx.x % 32;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  asm volatile("bar.sync 1, 256;" ::: "memory");  // all products of this block have been read
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    const int row = (group * S::BLOCKS + b) * 64 + warp * 16 + static_cast<int>(lane) / 4;
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) {
      const uint32_t at = leisure_at<S>(row + j / 2 % 2 * 8, j / 4 * 8 + static_cast<int>(lane) % 4 * 2 + j % 2);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(memory.begin + at * 4), "f"(sums[b][j]) : "memory");
    }
  }
  __syncwarp();
  if (lane < team.blocks()) barrier_publish_there(address_in_block(memory.ready(), lane));
  barrier_wait(memory.ready(), parity);
  constexpr int quads = S::ROWS / 4, all = quads * S::TOKENS;
  const int count = all / static_cast<int>(team.parts), first = count * static_cast<int>(me.part);
  for (int item = first + threadIdx.x; item < first + count; item += kSumThreads) {
    const int quad = item % quads * 4, token = item / quads;
    const uint32_t at = memory.begin + leisure_at<S>(quad, token) * 4;
    float4 parts[kMostParts];  // under way together
#pragma unroll
    for (uint32_t p = 0; p < kMostParts; p++) {
      if (p < team.parts) parts[p] = cluster_load(at, me.block(team, me.row, me.token, p), team.blocks());
    }
    float4 sum = parts[0];
#pragma unroll
    for (uint32_t p = 1; p < kMostParts; p++) {
      if (p < team.parts) sum = add4(sum, parts[p]);
    }
    if (token0 + token < n && row0 + quad < job.m) finish_rows<T>(job, sum, row0 + quad, token0 + token);
  }
  fence_copies();
  __syncwarp();
  if (lane < team.blocks()) barrier_arrive_there(address_in_block(memory.read(), lane));
}

template <class T, class S, bool transposed>
__device__ __forceinline__ void multiply_units(const WideList& list, const WideMemory<S>& memory, const WideRank& me,
                                               uint32_t cluster, uint32_t clusters) {
  const WidePlan& plan = list.plan;
  const GiveBack<S> give_back(memory, plan.team, me);
  RingPlace<S> at;
  uint32_t turn = 0, leisure = 0;
  for (uint32_t unit = cluster; unit < plan.first[kMaxProducts]; unit += clusters) {
    const WidePlace place = place_of(plan, unit);
    const Product& job = list.jobs[place.job];
    const RowRange steps = steps_of_part(static_cast<uint32_t>(job.k), me.part, plan.team.parts);
    const int row0 = static_cast<int>(place.row + me.row * S::ROWS);
    const int token0 = static_cast<int>(place.token + me.token * S::TOKENS);
    float sums[S::BLOCKS][S::TOKENS / 2];
    multiply_tile<T, S, transposed>(sums, memory, give_back, steps.end - steps.begin, at);
    if (at_leisure(plan, job)) {
      share_tile<T, S>(sums, memory, plan.team, me, job, list.n, row0, token0, leisure++ & 1);
    } else {
      write_tile<T, S>(sums, memory, job, list.n, row0, token0, turn);
    }
  }
}
#endif

template <class T, class S, bool transposed>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ WideList list) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(1024) unsigned char bytes[];
  const WideMemory<S> memory{(shared_address(bytes) + 1023) & ~1023u};
  const WideTeam& team = list.plan.team;
  const uint32_t cluster = blockIdx.x / team.blocks(), clusters = gridDim.x / team.blocks();
  const WideRank me(team, blockIdx.x % team.blocks());
  init_barriers(memory, team);
  if (threadIdx.x >= kSumThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kSumThreads) copy_units<S, transposed>(list, memory, me, cluster, clusters);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous();
    let_next_begin();
    multiply_units<T, S, transposed>(list, memory, me, cluster, clusters);
  }
  cluster_arrive(team.blocks());  // nobody ends while others copy into its memory or read it
  cluster_wait(team.blocks());
#endif
}

}  // namespace cog_rwkv

// wkv7 of a long sequence in parts that run at the same time, where heads are few.
//
// The recurrence is linear in the state S that a part begins with: its y is that from a state of zero plus S p for each
// token, and its end that from zero, N, plus S M. With the identity as state and no v the same recurrence gives p as
// its y and M as its end. So blocks compute both for each part but the first, and a second kernel joins the parts.
#pragma once

#include "warpgroup.cuh"

namespace cog_rwkv {

constexpr int kPartTokens = 512, kMostParts = 8;  // at least so many tokens a part, at most so many parts
// A part with the identity beside it has fewer warps to prepare chunks: the first part is longer than the others.
constexpr int kFirstShare = 5, kOtherShare = 4;

struct Parts {
  Half* passed;                                          // p: [tokens, heads, 64]
  float* ends;                                           // [places, heads, most, 2]: N and M of each part, [64, 64]
  int most;                                              // parts, by the number of heads
  static constexpr int64_t kShortest = 2 * kPartTokens;  // tokens of a sequence in parts

  // The length alone decides, and the number of heads.
  __host__ __device__ int of(int64_t tokens) const {
    const int64_t parts = tokens / kPartTokens;
    return parts < 1 ? 1 : parts < most ? static_cast<int>(parts) : most;
  }
  // First parts, or others, to look at: of each head.
  __host__ __device__ int units(const Layout& p, bool others) const {
    return static_cast<int>(p.heads * (others ? p.candidates(kShortest) * (most - 1) : p.candidates(p.shortest)));
  }
  // Where part `part` of so many begins, in tokens from the first.
  static __host__ __device__ int64_t begin(int64_t tokens, int part, int count) {
    if (part == 0) return 0;
    const int64_t chunks = (tokens + kChunk - 1) / kChunk, all = kFirstShare + kOtherShare * (count - 1);
    return part == count ? tokens : chunks * (kFirstShare + kOtherShare * (part - 1)) / all * kChunk;
  }
  // Packed sequences in parts are so long that no two begin in the same kPartTokens.
  __device__ float* end(const Layout& p, const Sequence& s, int64_t i, int64_t head, int part, int which) const {
    const int64_t place = p.rows == nullptr ? i : s.begin / kPartTokens;
    return ends + (((place * p.heads + head) * most + part) * 2 + which) * kHead * kHead;
  }
};

// What a block computes at a time: a part of a sequence, of a head.
struct Unit {
  Share share;     // of the part
  Sequence whole;  // that of the sequence
  int64_t i;
  int part, count;
};

// Unit `index` of first parts or of `others`, by parts, sequences and heads; false where there is nothing to compute.
template <class T>
__device__ __forceinline__ bool find_unit(Unit& u, const Wkv7<T, void>& p, const Parts& parts, bool others, int index) {
  const int64_t size = others ? Parts::kShortest : p.shortest;
  const int heads = static_cast<int>(p.heads), among = static_cast<int>(p.candidates(size)), place = index / heads;
  u.part = others ? 1 + place / among : 0;
  u.i = p.candidate(place % among, size);
  if (u.i < 0) return false;
  u.whole = sequence_of_block(p, u.i);
  const int64_t length = u.whole.end - u.whole.begin;
  u.count = length < Parts::kShortest || !p.is_candidate(u.whole, u.i, Parts::kShortest) ? 1 : parts.of(length);
  u.share = {u.whole, index % heads, 0, static_cast<int>(kHead)};
  if (!u.whole.row_ok || !p.takes(u.whole) || u.part >= u.count) return false;
  u.share.sequence.begin = u.whole.begin + Parts::begin(length, u.part, u.count);
  u.share.sequence.end = u.whole.begin + Parts::begin(length, u.part + 1, u.count);
  return true;
}

#if COG_RWKV_WGMMA
// Keys of a value, where the state is a plain matrix [64, 64] or one of another dtype.
template <class S>
__device__ __forceinline__ void load_state(WholeState& s, const S* from, bool aligned, int warp, int lane) {
  each_four_keys(s, lane, [&](float& a, float& b, float& c, float& d, int value, int key) {
    const float4 x = load4(from + (16 * warp + value) * kHead + key, aligned);
    a = x.x, b = x.y, c = x.z, d = x.w;
  });
}

template <class S>
__device__ __forceinline__ void store_state(WholeState& s, S* to, bool aligned, int warp, int lane) {
  each_four_keys(s, lane, [&](float a, float b, float c, float d, int value, int key) {
    store4(to + (16 * warp + value) * kHead + key, make_float4(a, b, c, d), aligned);
  });
}

// One of a block's groups: that of the values, or the second, of the identity.
template <class T>
__device__ __forceinline__ void follow_part(const Wkv7<T, void>& p, ScalarType state_type, const Parts& parts,
                                            const Unit& u, const Room& room, Turn& turn, int warp, int lane) {
  const int64_t corner = u.share.head * kHead * kHead;
  const auto end = [&](int which) { return parts.end(p, u.whole, u.i, u.share.head, u.part, which); };
  WholeState s;
  if (warp >= kGroup) {
    const int row = warp - kGroup;
    each_four_keys(s, lane, [&](float& a, float& b, float& c, float& d, int value, int key) {
      const int at = 16 * row + value - key;
      a = at == 0 ? 1.0f : 0.0f, b = at == 1 ? 1.0f : 0.0f, c = at == 2 ? 1.0f : 0.0f, d = at == 3 ? 1.0f : 0.0f;
    });
    follow_chunks<T, true>(s, u.share, parts.passed, p.heads, room, turn, warp, lane);
    store_state(s, end(1), true, row, lane);
    return;
  }
  if (u.part == 0) {
    with_state_type(state_type, [&](auto type) {
      using S = typename decltype(type)::type;
      load_state(s, static_cast<const S*>(p.state) + u.whole.row * p.in_stride + corner, p.aligned, warp, lane);
    });
  } else {
#pragma unroll
    for (int j = 0; j < 32; j++) s[j] = 0.0f;
  }
  follow_chunks<T, false>(s, u.share, p.y, p.heads, room, turn, warp, lane);
  if (u.count > 1) {
    store_state(s, end(0), true, warp, lane);
    return;
  }
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    store_state(s, static_cast<S*>(p.state_out) + u.whole.row * p.out_stride + corner, p.aligned, warp, lane);
  });
}
#endif

// The first `first_blocks` blocks take first parts, the others the others, with the identity beside them: each every
// so-many-th unit of its kind.
template <class T>
__global__ void __launch_bounds__(kGroupThreads, 1)
    wkv7_group_kernel(const Wkv7<T, void> p, ScalarType state_type, Parts parts, int first_blocks) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ Barriers barriers;
  wait_for_previous();
  let_next_begin();
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  for (int64_t j = block; p.alone && j < p.heads; j += blocks) {
    begin_share(p, 0, {sequence_of_block(p, 0), j, 0, static_cast<int>(kHead)});
  }
  const bool others = block >= first_blocks;
  const int groups = others ? 2 : 1, first = others ? block - first_blocks : block;
  const int step = others ? blocks - first_blocks : first_blocks, units = parts.units(p, others);
  const Room room{tiles, &barriers, (kGroupThreads / kWarp - groups * kGroup) / 2};
  if (threadIdx.x == 0) {
    for (int j = 0; j < room.pairs; j++) {
      init_barrier(&barriers.full[j], 2 * kWarp);
      init_barrier(&barriers.empty[j], kGroup * kWarp * groups);
    }
  }
  __syncthreads();
  // The same for the whole warp, as the compiler must know: products of a warp group cannot be where threads part.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  Unit u;
  if (warp < groups * kGroup) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kFollowerRegisters));
    Turn turn;
    for (int j = first; j < units; j += step) {
      if (find_unit(u, p, parts, others, j)) follow_part(p, state_type, parts, u, room, turn, warp, lane);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPreparerRegisters));
    const int pair = (warp - groups * kGroup) / 2;
    int before = 0;
    uint32_t parity = 1;
    for (int j = first; j < units; j += step) {
      if (!find_unit(u, p, parts, others, j)) continue;
      prepare_chunks(p, u.share, room, before, parity, pair, Team{1 + pair, warp % 2, lane});
      before += static_cast<int>((u.share.sequence.end - u.share.sequence.begin + kChunk - 1) / kChunk) % room.pairs;
    }
  }
#endif
}

constexpr int kJoinWarps = 8, kJoinTokens = 256;  // of a block that joins: tokens of a part
constexpr int kJoinBlocks = 8;                    // a multiprocessor, at most
constexpr int kJoinRow = 80;                      // floats from a row of a state to the next, for the banks

// next = state m + n, for matrices of 64 x 64, by all warps. `state` and `next` are in shared memory.
__device__ __forceinline__ void pass_state(float* next, const float* state, const float* m, const float* n, int warp,
                                           int lane) {
  const int g = lane / 4, q = lane % 4, row = warp % 4 * 16 + g, first = warp / 4 * 32;
  Sums sums[4] = {}, fine[4] = {};
#pragma unroll 2
  for (int k = 0; k < static_cast<int>(kHead); k += 8) {
    const float* left = state + row * kJoinRow + k + q;
    const Left x = {left[0], left[8 * kJoinRow], left[4], left[8 * kJoinRow + 4]};
    multiply<true, 4>([&](int j) -> TileProduct {
      const float* right = m + (k + q) * kHead + first + 8 * j + g;
      return {sums[j], fine[j], x, {right[0], right[4 * kHead]}};
    });
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = row + i / 2 * 8, column = first + 8 * j + 2 * q + i % 2;
      next[at * kJoinRow + column] = sums[j][i] + fine[j][i] + n[at * kHead + column];
    }
  }
}

// y += S p for 16 tokens from `token` on, n of them there, by a warp.
template <class T>
__device__ __forceinline__ void add_passed(T* y, const Half* passed, int64_t stride, const float* state, int n,
                                           int lane) {
  const int g = lane / 4, q = lane % 4;
  Sums sums[8] = {};
  const int rows[2] = {min(g, n - 1), min(g + 8, n - 1)};
#pragma unroll
  for (int k = 0; k < static_cast<int>(kHead); k += 16) {  // four keys of this lane: two steps of eight for the warp
    const auto top = load_vector<Half, 4>(passed + rows[0] * stride + k + 4 * q);
    const auto bottom = load_vector<Half, 4>(passed + rows[1] * stride + k + 4 * q);
    float4 s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 x = float4_at(state + (8 * j + g) * kJoinRow + k + 4 * q);
      s[j] = make_float4(operand<false>(x.x), operand<false>(x.y), operand<false>(x.z), operand<false>(x.w));
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const Left x = {static_cast<float>(top.values[2 * step]), static_cast<float>(bottom.values[2 * step]),
                      static_cast<float>(top.values[2 * step + 1]), static_cast<float>(bottom.values[2 * step + 1])};
      multiply<false, 8>([&](int j) -> TileProduct {
        return {sums[j], sums[j], x, {step ? s[j].z : s[j].x, step ? s[j].w : s[j].y}};
      });
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (g + 8 * i >= n) continue;
    T* const to = y + (g + 8 * i) * stride + 2 * q;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const auto before = load_vector<T, 2>(to + 8 * j);
      const Vector<T, 2> after{{static_cast<T>(static_cast<float>(before.values[0]) + sums[j][2 * i]),
                                static_cast<T>(static_cast<float>(before.values[1]) + sums[j][2 * i + 1])}};
      store_vector<T, 2>(to + 8 * j, after);
    }
  }
}

// Some tokens of a part that is not the first, of a sequence and head; the state that the part begins with is computed
// for each of them. Those with the first tokens of the last part also leave the last state.
template <class T>
__device__ __forceinline__ void join_tokens(const Wkv7<T, void>& p, ScalarType state_type, const Parts& parts,
                                            float (&states)[2][kHead * kJoinRow], int piece, int unit) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Unit u;
  if (!find_unit(u, p, parts, true, unit)) return;
  const auto end = [&](int part, int which) { return parts.end(p, u.whole, u.i, u.share.head, part, which); };
  const int64_t head = u.share.head, to = u.share.sequence.end;
  const int64_t from = u.share.sequence.begin + int64_t{piece} * kJoinTokens;
  if (from >= to) return;
  const float* start = end(0, 0);
  for (int at = static_cast<int>(threadIdx.x) * 4; at < kHead * kHead; at += kJoinWarps * kWarp * 4) {
    float4_at(states[0] + at / kHead * kJoinRow + at % kHead) = float4_at(start + at);
  }
  __syncthreads();
  for (int j = 1; j < u.part; j++) {
    pass_state(states[j % 2], states[(j + 1) % 2], end(j, 1), end(j, 0), warp, lane);
    __syncthreads();
  }
  float* const state = states[(u.part + 1) % 2];
  const int64_t stride = p.heads * kHead;
  for (int tile = warp; tile < kJoinTokens / kChunk; tile += kJoinWarps) {
    const int64_t token = from + tile * kChunk, at = (token * p.heads + head) * kHead;
    if (token >= to) break;
    const int n = static_cast<int>(min(to - token, int64_t{kChunk}));
    add_passed(p.y + at, parts.passed + at, stride, state, n, lane);
  }
  if (u.part < u.count - 1 || piece > 0) return;
  float* const last = states[u.part % 2];
  pass_state(last, state, end(u.part, 1), end(u.part, 0), warp, lane);
  __syncthreads();
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    S* const out = static_cast<S*>(p.state_out) + u.whole.row * p.out_stride + head * kHead * kHead;
    for (int x = static_cast<int>(threadIdx.x) * 4; x < kHead * kHead; x += kJoinWarps * kWarp * 4) {
      store4(out + x, float4_at(last + x / kHead * kJoinRow + x % kHead), p.aligned);
    }
  });
}

// A block takes every so-many-th piece of a part.
template <class T>
__global__ void __launch_bounds__(kJoinWarps* kWarp)
    wkv7_join_kernel(const Wkv7<T, void> p, ScalarType state_type, Parts parts, int pieces) {
  __shared__ __align__(16) float states[2][kHead * kJoinRow];
  wait_for_previous();
  let_next_begin();
  const int64_t all = int64_t{parts.units(p, true)} * pieces;
  for (int64_t j = blockIdx.x; j < all; j += gridDim.x) {
    join_tokens(p, state_type, parts, states, static_cast<int>(j % pieces), static_cast<int>(j / pieces));
    __syncthreads();
  }
}

}  // namespace cog_rwkv

// The residual sum, the layer norm, the token shift and its mixes, in one kernel: what stands between two matrix
// products of RWKV-7. Kernels for many tokens are here, that for few in norm_few.cuh, and which is taken in
// norm_launch.cuh.
#pragma once

#include "../csrc/packed.cuh"
#include "rows.cuh"

namespace cog_rwkv {

constexpr int kNormThreads = 1024;  // at most
constexpr int64_t kMostChannels = 8 * kNormThreads;

// Rows of shift state that a kernel left in `from` [batch, c] for the next of its kind to put in `to`: those of
// sequences that end in another run of tokens than they begin in. `each`: tokens of a run. Null: there are none.
struct LeftRows {
  float *from = nullptr, *to = nullptr;  // rows `stride` of NormShift apart in `to`
  uint32_t each = 1;
};

// M, the number of mixes, is a constant of the kernels: 0 is the layer norm alone, into one row.
template <class W>
struct NormShift : ResidualRows {
  float* x_out;                      // [n, c], another tensor than x; or null
  const float *weight, *bias, *mix;  // [c], [c], [M, c]
  float* shift;                      // [pool_rows, c], rows `stride` apart
  const int64_t *rows, *cu_seqlens;  // [batch], [batch + 1]; cu_seqlens null: a token each
  W* out;                            // [M, n, c]
  float* left;                       // [batch, c], for the next kernel to put in `shift`; null without cu_seqlens
  LeftRows before;                   // of the kernel before this one
  int64_t stride, batch, pool_rows;
  uint32_t each;    // tokens that a block walks through
  uint32_t stages;  // of these, as many are on their way at once
  float out_scale;  // of a single mix
};

// The weights of four channels, of which the mixes are kept or read when they are wanted.
template <int M, bool kept>
struct ChannelWeights {
  float4 weight, bias, mixes[kept && M > 0 ? M : 1];

  template <class W>
  __device__ __forceinline__ void load(const NormShift<W>& p, uint32_t c) {
    weight = float4_of(p.weight + c), bias = float4_of(p.bias + c);
    if constexpr (kept) {
#pragma unroll
      for (int m = 0; m < M; m++) mixes[m] = float4_of(p.mix + m * p.c + c);
    }
  }
  template <class W>
  __device__ __forceinline__ float4 mix(const NormShift<W>& p, uint32_t c, int m) const {
    if constexpr (kept) return mixes[m];
    return float4_of(p.mix + m * p.c + c);
  }
  __device__ __forceinline__ float4 normed(float4 x, RowScale row) const {
    return each4(row(x), weight, [](float value, float f) { return value * f; }) + bias;
  }
};

// The sequence that a token is in: number `index`, tokens begin to end. Its row of the pool, or why there is none.
struct TokenSequence {
  uint32_t index, begin, end;
  int row;

  static constexpr int kPadding = -1;  // of a batch: its activations are zero, and it has no state
  static constexpr int kNowhere = -2;
  __device__ bool row_ok() const { return row >= 0; }
};

template <class W>
__device__ __forceinline__ int row_of(const NormShift<W>& p, int64_t row) {
  if (row >= 0 && row < p.pool_rows) return static_cast<int>(row);
  return row == -1 ? TokenSequence::kPadding : TokenSequence::kNowhere;
}

// Of token t of packed sequences; it ends with t where there is none.
template <class W>
__device__ __forceinline__ TokenSequence sequence_at_token(const NormShift<W>& p, uint32_t t) {
  const TokenSequence none{0, t, t + 1, TokenSequence::kNowhere};
  const int64_t i = sequence_of(p.cu_seqlens, p.batch, t);
  if (i < 0) return none;
  const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
  if (s.begin > t || t >= s.end) return none;
  return {static_cast<uint32_t>(i), static_cast<uint32_t>(s.begin), static_cast<uint32_t>(s.end), row_of(p, s.row)};
}

// What a token of its own without a row of the pool has instead of its values and those before it.
__device__ __forceinline__ void be_nothing(int row, float4& y, float4& before) {
  before = all4(row == TokenSequence::kPadding ? 0.0f : nanf(""));
  if (row == TokenSequence::kPadding) y = before;
}

// A token's mixes from its normalised row and that of the token before it.
template <int M, bool kept, class W>
__device__ __forceinline__ void mix_channels(const NormShift<W>& p, const ChannelWeights<M, kept>& w, uint32_t t,
                                             uint32_t c, float4 now, float4 before) {
  const float4 back = each4(before, now, [](float b, float n) { return b - n; });
  W* out = p.out + p.at(t, c);
#pragma unroll
  for (int m = 0; m < M; m++, out += p.size) {
    float4 mixed = now + each4(back, w.mix(p, c, m), [](float d, float f) { return d * f; });
    if constexpr (M == 1) mixed = mixed * p.out_scale;
    store_rounded(out, mixed);
  }
}

// Whether a sequence ends in another run of `each` tokens than it begins in.
__device__ __forceinline__ bool crosses(const Sequence& s, uint32_t each) {
  return static_cast<uint32_t>(s.begin) / each != static_cast<uint32_t>(s.end - 1) / each;
}

template <class W>
__device__ __forceinline__ void put_left_rows(const NormShift<W>& p) {
  if (p.before.from == nullptr) return;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < p.batch; i += gridDim.x) {
    const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
    if (!s.row_ok || s.begin == s.end || !crosses(s, p.before.each)) continue;
#pragma unroll 1
    for (uint32_t c = threadIdx.x * 4; c < p.c; c += blockDim.x * 4) {
      store(p.before.to + s.row * p.stride + c, float4_of(p.before.from + i * p.c + c));
    }
  }
}

// Where a block is among its turns.
struct Turn {
  uint32_t at = 0, round = 0;

  __device__ __forceinline__ void go_on(uint32_t stages) {
    if (++at == stages) at = 0, round++;
  }
};

// A token each, a block a run of them. Before the wait it reads the weights, the states and, where something is to be
// added to it, the residual stream: the kernel that wrote that is not the one just before. On Hopper.
template <class W, int M>
__global__ void __launch_bounds__(kNormThreads) norm_each_kernel(const NormShift<W> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ GroupSums sums;
  __shared__ uint64_t arrived[kMostStages];
  const Channels<1> channels(p);
  const RowRing<W> ring(p, memory, arrived, true);
  const bool exists = channels.exists(0), early = p.delta.slices > 0;
  const uint32_t c = channels.channel(0), first = blockIdx.x * p.each, end = min(first + p.each, p.n);
  const uint32_t ahead = min(first + p.stages, end);
  const auto begin = [&](uint32_t t, uint32_t turn, bool with_x) {
    const int row = row_of(p, p.rows[t]);
    ring.begin(t, turn, row >= 0 ? p.shift + row * p.stride : nullptr, with_x);
  };
  if (threadIdx.x == 0) {
    ring.make(p.stages);
#pragma unroll 1
    for (uint32_t t = first; t < ahead; t++) begin(t, t - first, early);
  }
  ChannelWeights<M, true> weights;
  if (exists) weights.load(p, c);
  int64_t next_row = p.rows[first];
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (uint32_t t = first; t < ahead; t++) ring.begin_rest(t, t - first, !early);
  }
  Turn turn;
  uint32_t copier = 0;  // the thread that copies: each time of another warp, as that comes later to the mixes
#pragma unroll 1
  for (uint32_t t = first; t < end; t++) {
    const int64_t its_row = next_row;
    next_row = p.rows[min(t + 1, end - 1)];
    float4 x[1] = {all4(0.0f)}, before = all4(0.0f);
    ring.wait(turn.at, turn.round);
    if (exists) x[0] = ring.take(turn.at, c), before = ring.take_state(turn.at, c);
    const RowScale scale = scale_of_row<false>(p, channels, x, sums, t - first);
    if (threadIdx.x == copier && t + p.stages < end) {
      begin(t + p.stages, turn.at, true), ring.begin_rest(t + p.stages, turn.at, false);
    }
    copier = copier + 32 < blockDim.x ? copier + 32 : 0;
    turn.go_on(p.stages);
    if (!exists) continue;
    const int row = row_of(p, its_row);
    float4 y = weights.normed(x[0], scale);
    if (row >= 0) {
      store(p.shift + row * p.stride + c, y);
    } else {
      be_nothing(row, y, before);
    }
    if (p.x_out != nullptr) store(p.x_out + p.at(t, c), x[0]);
    mix_channels(p, weights, t, c, y, before);
  }
}

// Packed sequences, a block a run of tokens. The state's row of a sequence is read by who has its first token and made
// by who has its last, and these may be two: where a sequence goes on beyond a run, the next kernel puts the row in
// place, once all have been read.
//
// A run begins with the token before it, which is another block's to write: also where nothing follows from that, as it
// takes its time to know. With V = 1 rows come by bulk copies; that is for Hopper.
template <class W, int V, int M>
__global__ void __launch_bounds__(kNormThreads) norm_walk_kernel(const NormShift<W> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ GroupSums sums;
  __shared__ uint64_t arrived[kMostStages];
  const Channels<V> channels(p);
  const RowRing<W> ring(p, memory, arrived, false);
  const DeltaReader<W> delta(p);
  constexpr bool kept = V == 1;
  const bool copies = V == 1 && threadIdx.x == 0, early = p.delta.slices > 0;
  const uint32_t first = blockIdx.x * p.each, end = min(first + p.each, p.n), start = max(first, 1u) - 1;
  const uint32_t ahead = min(start + p.stages, end);
  if (copies) {
    ring.make(p.stages);
#pragma unroll 1
    for (uint32_t t = start; t < ahead; t++) ring.begin(t, t - start, nullptr, early);
  }
  ChannelWeights<M, kept> weights;
  if constexpr (kept) {
    if (channels.exists(0)) weights.load(p, channels.channel(0));
    __syncthreads();
  }
  wait_for_previous();
  let_next_begin();
  if (copies) {
#pragma unroll 1
    for (uint32_t t = start; t < ahead; t++) ring.begin_rest(t, t - start, !early);
  }
  // Before the first token of a sequence; where that has no row, before all of them.
  float4 before[V];
  const auto load_state = [&](const TokenSequence& s) {
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (!s.row_ok()) {
        before[j] = all4(nanf(""));
      } else if (channels.exists(j)) {
        before[j] = float4_of(p.shift + s.row * p.stride + channels.channel(j));
      }
    }
  };
  TokenSequence s = sequence_at_token(p, first);
  const bool begins = s.begin == first || !s.row_ok();
  if (begins) load_state(s);
  Turn turn;
  uint32_t copier = 0;  // the thread that copies: each time of another warp, as that comes later to the mixes
#pragma unroll 1
  for (uint32_t t = start; t < end; t++) {
    if (t > first && t >= s.end) {
      s = sequence_at_token(p, t);
      load_state(s);
    }
    float4 x[V];
    if constexpr (V == 1) ring.wait(turn.at, turn.round);
#pragma unroll
    for (int j = 0; j < V; j++) {
      x[j] = all4(0.0f);
      if (!channels.exists(j)) continue;
      const uint32_t c = channels.channel(j);
      x[j] = V == 1 ? ring.take(turn.at, c) : delta.template add_to<4>(float4_of(p.x + p.at(t, c)), p.at(t, c));
    }
    const RowScale scale = scale_of_row<false>(p, channels, x, sums, t - start);
    if (const uint32_t next = t + p.stages; V == 1 && threadIdx.x == copier && next < end) {
      ring.begin(next, turn.at, nullptr, true), ring.begin_rest(next, turn.at, false);
    }
    copier = copier + 32 < blockDim.x ? copier + 32 : 0;
    turn.go_on(p.stages);
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (!channels.exists(j)) continue;
      const uint32_t c = channels.channel(j);
      if constexpr (!kept) weights.load(p, c);
      const float4 y = weights.normed(x[j], scale);
      if (t >= first) {
        if (p.x_out != nullptr) store(p.x_out + p.at(t, c), x[j]);
        mix_channels(p, weights, t, c, y, before[j]);
        if (t == s.end - 1 && s.row_ok()) {
          store((s.begin >= first ? p.shift + s.row * p.stride : p.left + size_t{s.index} * p.c) + c, y);
        }
      }
      if (t >= first ? s.row_ok() : !begins) before[j] = y;
    }
  }
  put_left_rows(p);
}

}  // namespace cog_rwkv

// The residual sum, the layer norm, the token shift and its mixes, in one kernel: what stands between two matrix
// products of RWKV-7.
#pragma once

#include "../csrc/packed.cuh"
#include "rows.cuh"

namespace cog_rwkv {

constexpr int kNormThreads = 1024;  // at most
constexpr int kMostMixes = 6;
constexpr int64_t kMostChannels = 8 * kNormThreads;

// Rows of shift state that a kernel left in `from` [batch, c] for the next of its kind to put in `to`: those of
// sequences that end in another run of tokens than they begin in. `each`: tokens of a run. Null: there are none.
struct LeftRows {
  float *from = nullptr, *to = nullptr;  // rows `stride` of NormShift apart in `to`
  uint32_t each = 1;
};

template <class W>
struct NormShift : ResidualRows {
  float* x_out;                      // [n, c], another tensor than x; or null
  const float *weight, *bias, *mix;  // [c], [c], [mixes, c]
  float* shift;                      // [pool_rows, c], rows `stride` apart
  const int64_t *rows, *cu_seqlens;  // [batch], [batch + 1]; cu_seqlens null: a token each
  W* out;                            // [mixes, n, c]
  float* left;                       // [batch, c], for the next kernel to put in `shift`; null without cu_seqlens
  LeftRows before;                   // of the kernel before this one
  int64_t mixes, stride, batch, pool_rows;
  uint32_t each;    // tokens that a cluster walks through
  uint32_t stages;  // of these, as many are on their way at once
  float out_scale;
};

// The weights of four channels, of which the mixes are kept or read when they are wanted.
template <class W, bool kept>
struct ChannelWeights {
  float4 weight, bias, mixes[kept ? kMostMixes : 1];

  __device__ __forceinline__ void load(const NormShift<W>& p, uint32_t c) {
    weight = float4_of(p.weight + c), bias = float4_of(p.bias + c);
    if constexpr (kept) {
#pragma unroll
      for (int m = 0; m < kMostMixes; m++) {
        if (m < p.mixes) mixes[m] = float4_of(p.mix + m * p.c + c);
      }
    }
  }
  __device__ __forceinline__ float4 mix(const NormShift<W>& p, uint32_t c, int m) const {
    if constexpr (kept) return mixes[m];
    return float4_of(p.mix + m * p.c + c);
  }
  __device__ __forceinline__ float4 scaled(float4 x, RowScale row) const {
    return each4(x, weight, [&](float value, float f) { return (value - row.mean) * row.scale * f; }) + bias;
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

// Of token t; it ends with t where there is none.
template <class W>
__device__ __forceinline__ TokenSequence sequence_at_token(const NormShift<W>& p, uint32_t t) {
  if (p.cu_seqlens == nullptr) return {t, t, t + 1, row_of(p, p.rows[t])};
  const TokenSequence none{0, t, t + 1, TokenSequence::kNowhere};
  const int64_t i = sequence_of(p.cu_seqlens, p.batch, t);
  if (i < 0) return none;
  const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
  if (s.begin > t || t >= s.end) return none;
  return {static_cast<uint32_t>(i), static_cast<uint32_t>(s.begin), static_cast<uint32_t>(s.end), row_of(p, s.row)};
}

// A token's mixes, times `out_scale`, from its normalised row and that of the token before it.
template <class W, bool kept>
__device__ __forceinline__ void mix_channels(const NormShift<W>& p, const ChannelWeights<W, kept>& w, uint32_t t,
                                             uint32_t c, float4 now, float4 before) {
  const float4 back = each4(before, now, [](float b, float n) { return b - n; });
  W* out = p.out + p.at(t, c);
#pragma unroll
  for (int m = 0; m < kMostMixes; m++) {
    if (m >= p.mixes) break;
    const float4 mixed = now + each4(back, w.mix(p, c, m), [](float d, float f) { return d * f; });
    store_rounded(out, mixed * p.out_scale);
    out += p.size;
  }
}

// Whether a sequence ends in another run of `each` tokens than it begins in.
__device__ __forceinline__ bool crosses(const Sequence& s, uint32_t each) {
  return static_cast<uint32_t>(s.begin) / each != static_cast<uint32_t>(s.end - 1) / each;
}

template <class W>
__device__ __forceinline__ void put_left_rows(const NormShift<W>& p) {
  if (p.before.from == nullptr) return;
  for (int64_t i = blockIdx.x; i < p.batch; i += gridDim.x) {
    const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
    if (!s.row_ok || s.begin == s.end || !crosses(s, p.before.each)) continue;
#pragma unroll 1
    for (uint32_t c = threadIdx.x * 4; c < p.c; c += blockDim.x * 4) {
      *reinterpret_cast<float4*>(p.before.to + s.row * p.stride + c) = float4_of(p.before.from + i * p.c + c);
    }
  }
}

// A cluster a run of tokens. The state's row of a sequence is read by who has its first token and made by who has its
// last, and these may be two: where a sequence goes on beyond a run, the next kernel puts the row in place, once all
// have been read.
//
// Before the wait it reads the weights, the first state and, where something is to be added to it, the residual stream:
// the kernel that wrote that is not the one just before. The weights come first, as nothing has to be known for them.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_shift_kernel(const NormShift<W> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ GroupSums sums;
  begin_sums<V>(p, sums);
  const Channels<V> channels(p);
  const RowReader<W, V> reader{p, channels, memory};
  constexpr bool kept = V == 1;
  ChannelWeights<W, kept> weights;
  if constexpr (kept) {
    if (channels.exists(0)) weights.load(p, channels.channel(0));
  }
  const uint32_t first = blockIdx.x / p.parts * p.each, end = min(first + p.each, p.n);
  TokenSequence s = sequence_at_token(p, first);
  // A run in the middle of a sequence begins with the token before it, which is another cluster's to write.
  const uint32_t start = s.row_ok() && s.begin < first ? first - 1 : first;
  float4 before[V];
  const auto load_state = [&] {
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (channels.exists(j)) before[j] = float4_of(p.shift + s.row * p.stride + channels.channel(j));
    }
  };
  if (s.row_ok() && s.begin == first) load_state();
  const bool early = p.delta.slices > 0;
#pragma unroll 1
  for (uint32_t turn = 0; turn < p.stages; turn++) {
    if (early && start + turn < end) reader.begin_x(start + turn, turn);
  }
  wait_for_previous();
  let_next_begin();
#pragma unroll 1
  for (uint32_t turn = 0; turn < p.stages; turn++) {
    if (start + turn < end) {
      if (!early) reader.begin_x(start + turn, turn);
      reader.begin_delta(start + turn, turn);
    }
    end_group();
  }
  uint32_t turn = 0;
  for (uint32_t t = start; t < end; t++) {
    if (t > first && t >= s.end) {
      s = sequence_at_token(p, t);
      if (s.row_ok() && t == s.begin) load_state();
    }
    float4 x[V];
    wait_for_groups(p.stages - 1);
    reader.take(t, turn, x);
    if (t + p.stages < end) reader.begin_x(t + p.stages, turn), reader.begin_delta(t + p.stages, turn);
    end_group();
    turn = turn + 1 < p.stages ? turn + 1 : 0;
    const RowScale row = scale_of_row(p, channels, x, sums, t - start);
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (!channels.exists(j)) continue;
      const uint32_t c = channels.channel(j);
      if constexpr (!kept) weights.load(p, c);
      float4 y = weights.scaled(x[j], row);
      if (t >= first) {
        if (!s.row_ok()) {
          before[j] = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
          if (s.row == TokenSequence::kPadding) y = before[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        if (p.x_out != nullptr) *reinterpret_cast<float4*>(p.x_out + p.at(t, c)) = x[j];
        mix_channels(p, weights, t, c, y, before[j]);
        if (s.row_ok() && t == s.end - 1) {
          float* to = s.begin >= first ? p.shift + s.row * p.stride : p.left + size_t{s.index} * p.c;
          *reinterpret_cast<float4*>(to + c) = y;
        }
      }
      before[j] = y;
    }
  }
  put_left_rows(p);
}

// The layer norm of some tokens alone: `out` is [count, c]. Without `cu_seqlens` it is all tokens, else the last of
// each sequence; NaN where there is none. There are no mixes.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormShift<W> p, bool last) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ GroupSums sums;
  begin_sums<V>(p, sums);
  const Channels<V> channels(p);
  const RowReader<W, V> reader{p, channels, memory};
  const uint32_t i = blockIdx.x / p.parts;
  uint32_t t = i;
  bool ok = true;
  ChannelWeights<W, V == 1> weights;
  if constexpr (V == 1) {
    if (channels.exists(0)) weights.load(p, channels.channel(0));
  }
  wait_for_previous();
  let_next_begin();
  if (last) {
    const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
    ok = s.begin < s.end;
    t = ok ? static_cast<uint32_t>(s.end - 1) : 0;
  }
  float4 x[V];
  reader.begin_x(t, 0), reader.begin_delta(t, 0);
  end_group();
  wait_for_groups(0);
  reader.take(t, 0, x);
  const RowScale row = scale_of_row(p, channels, x, sums, 0);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.exists(j)) continue;
    const uint32_t c = channels.channel(j);
    if constexpr (V != 1) weights.load(p, c);
    const float4 y = weights.scaled(x[j], row), nothing = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
    store_rounded(p.out + size_t{i} * p.c + c, ok ? y : nothing);
  }
  put_left_rows(p);
}

// The GPU that kernels are cut for.
struct NormDevice {
  int multiprocessors;
  bool clusters;  // rows may be shared
};

// How a launch is cut.
struct NormCut {
  uint32_t parts;  // blocks that share a row, a power of two
  unsigned threads;
  uint32_t each;    // tokens a cluster walks through, so that it loads the weights once
  uint32_t stages;  // tokens whose rows have room in shared memory
  size_t bytes;     // of shared memory, for these
};

constexpr int64_t kNormRoom = 216 << 10;  // of a multiprocessor's shared memory

// What a multiprocessor moves, some 100 bytes a nanosecond, while the blocks of a cluster start together and tell each
// other their sums.
constexpr int64_t kWorthSharing = 48 << 10;

// The blocks that share a row of `groups`: those that its copies need, or more where tokens are few and rows heavy.
template <class W>
int64_t parts_of_row(const NormShift<W>& p, int64_t groups, int64_t group_bytes, int64_t places) {
  const int64_t own = std::min<int64_t>(kNormThreads / 32, kNormRoom / group_bytes);
  int64_t parts = 1;
  while (groups > parts * own) parts *= 2;
  int64_t most = parts;
  while (most < std::min<int64_t>(groups, kMostInCluster) && 2 * most <= places) most *= 2;
  const int64_t width = p.delta.rounded ? sizeof(W) : sizeof(float);
  const int64_t moved = p.c * (2 * sizeof(float) + p.delta.slices * width + p.mixes * sizeof(W));
  return moved - moved / most > kWorthSharing ? most : parts;
}

// Tokens that follow each other: those of a run begin with the one before them again.
template <class W>
NormCut cut_rows(const NormShift<W>& p, int64_t tokens, NormDevice device, bool walks, bool follow) {
  const int64_t groups = (int64_t{p.c} + kGroup - 1) / kGroup, multiprocessors = device.multiprocessors;
  if (!device.clusters) {
    const auto threads = static_cast<unsigned>((groups + 1) / 2 * 32);
    const int64_t at_once = multiprocessors * std::max<int64_t>(kNormThreads / threads, 1);
    return {1, threads, static_cast<uint32_t>(walks ? (tokens + at_once - 1) / at_once : 1), 1, 0};
  }
  const int64_t group_bytes = kGroup * sizeof(float) * (1 + p.delta.slices);
  const int64_t parts = parts_of_row(p, groups, group_bytes, multiprocessors / tokens);
  const int64_t own = (groups + parts - 1) / parts, stage = own * group_bytes;
  const int64_t blocks = std::clamp<int64_t>(kNormRoom / stage, 1, kNormThreads / 32 / own);
  const int64_t at_once = std::max<int64_t>(multiprocessors * blocks / parts, 1);
  int64_t each = walks ? (tokens + at_once - 1) / at_once : 1;
  if (walks && follow && tokens > multiprocessors) each = std::max<int64_t>(each, 2);  // not each token twice
  const int64_t all = (tokens + each - 1) / each * parts;
  const int64_t beside = std::min(blocks, (all + multiprocessors - 1) / multiprocessors);
  const int64_t most = std::min<int64_t>(kMostStages, each + (walks && follow ? 1 : 0));
  const int64_t stages = std::clamp<int64_t>(kNormRoom / (beside * stage), 1, most);
  return {static_cast<uint32_t>(parts), static_cast<unsigned>(own * 32), static_cast<uint32_t>(each),
          static_cast<uint32_t>(stages), static_cast<size_t>(stages * stage)};
}

template <class W, class... Arguments>
void launch_rows(const char* op, cudaStream_t stream, const NormCut& cut, int64_t runs,
                 void (*kernel)(NormShift<W>, Arguments...), const NormShift<W>& p, Arguments... arguments) {
  const dim3 grid(static_cast<unsigned>(runs * cut.parts));
  launch_chained_clusters(op, stream, cut.parts, kernel, grid, dim3(cut.threads), cut.bytes, p, arguments...);
}

// Returns what it left for the next one.
template <class W>
LeftRows norm_shift(const char* op, cudaStream_t stream, NormShift<W> p, NormDevice device) {
  const NormCut cut = cut_rows(p, p.n, device, true, p.cu_seqlens != nullptr);
  p.parts = cut.parts, p.each = cut.each, p.stages = cut.stages;
  const auto kernel = device.clusters ? norm_shift_kernel<W, 1> : norm_shift_kernel<W, 2>;
  launch_rows(op, stream, cut, (int64_t{p.n} + cut.each - 1) / cut.each, kernel, p);
  return {p.left, p.shift, cut.each};
}

// `count` rows of layer norm, as norm_kernel says.
template <class W>
void norm_rows(const char* op, cudaStream_t stream, NormShift<W> p, int64_t count, bool last, NormDevice device) {
  const NormCut cut = cut_rows(p, count, device, false, false);
  p.parts = cut.parts;
  const auto kernel = device.clusters ? norm_kernel<W, 1> : norm_kernel<W, 2>;
  launch_rows(op, stream, cut, count, kernel, p, last);
}

}  // namespace cog_rwkv

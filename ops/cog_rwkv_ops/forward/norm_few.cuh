// norm_shift for few tokens, and the last norm of a step. What counts is how soon a row is there after the kernel
// before has ended: so a block is small enough to be there beside that one's, all of a row's loads are on their way at
// once, and the blocks of a cluster may share a row.
#pragma once

#include "norm_shift.cuh"

namespace cog_rwkv {

constexpr int kFewThreads = 256;  // at most, with V = 1

// The token of row i: with `last` the last one of sequence i, where it has one.
struct RowToken {
  uint32_t t;
  bool ok;
};

template <class W>
__device__ __forceinline__ RowToken token_of_row(const NormShift<W>& p, uint32_t i, bool last) {
  if (!last) return {i, true};
  const Sequence s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
  if (s.begin == s.end) return {0, false};
  return {static_cast<uint32_t>(s.end - 1), true};
}

// A cluster a row. With mixes: a token each, its state read before the wait and written after. Without: the layer norm
// of some tokens alone, `out` is [count, c]: all of them, or with `last` the last of each sequence, NaN where there is
// none.
template <class W, int V, int M>
__global__ void __launch_bounds__(V == 1 ? kFewThreads : kNormThreads, V == 1 ? 2 : 1)
    norm_few_kernel(const NormShift<W> p, bool last) {
  __shared__ GroupSums sums;
  begin_sums(p, sums);
  const Channels<V> channels(p);
  const DeltaReader<W> delta(p);
  const uint32_t i = blockIdx.x >> (__ffs(static_cast<int>(p.parts)) - 1);
  constexpr bool kept = V == 1;
  const auto each = [&](auto f) {
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (channels.exists(j)) f(j, channels.channel(j));
    }
  };
  // The weights first, as nothing has to be known for them.
  ChannelWeights<M, kept> weights;
  if constexpr (kept) each([&](int, uint32_t c) { weights.load(p, c); });
  const RowToken token = token_of_row(p, i, M == 0 && last);
  float4 x[V], before[V];
#pragma unroll
  for (int j = 0; j < V; j++) x[j] = before[j] = all4(0.0f);
  const auto load_x = [&] { each([&](int j, uint32_t c) { x[j] = float4_beyond(p.x + p.at(token.t, c)); }); };
  const bool early = p.delta.slices > 0;
  if (early) load_x();
  const int row = M == 0 ? 0 : row_of(p, p.rows[i]);
  if (M > 0 && row >= 0) each([&](int j, uint32_t c) { before[j] = float4_beyond(p.shift + row * p.stride + c); });
  greet_cluster(p);
  wait_for_previous();
  let_next_begin();
  if (!early) load_x();
  each([&](int j, uint32_t c) { x[j] = delta.template add_to<V == 1 ? 8 : 2>(x[j], p.at(token.t, c)); });
  const RowScale scale = scale_of_row<V == 1>(p, channels, x, sums, 0);
  each([&](int j, uint32_t c) {
    if constexpr (!kept) weights.load(p, c);
    float4 y = weights.normed(x[j], scale);
    if constexpr (M == 0) {
      store_rounded(p.out + size_t{i} * p.c + c, token.ok ? y : all4(nanf("")));
    } else {
      if (row < 0) be_nothing(row, y, before[j]);
      mix_channels(p, weights, token.t, c, y, before[j]);
      if (row >= 0) store(p.shift + row * p.stride + c, y);
      if (p.x_out != nullptr) store(p.x_out + p.at(token.t, c), x[j]);
    }
  });
  if constexpr (M == 0) put_left_rows(p);
}

}  // namespace cog_rwkv

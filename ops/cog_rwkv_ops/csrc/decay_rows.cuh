// Chunked scans where rows of M decay, float32 throughout: d_r with the gradient of u, and d_k with that of w. A warp
// has 16 keys, and needs the decays of those alone.
#pragma once

#include "decay_blocks.cuh"

namespace cog_rwkv {

enum RowPart { kEnter, kLeave, kEight, kFour, kTwo, kRowParts };

template <class T>
struct RowsShared {
  alignas(16) Rows<T> p, q, x, w;
  alignas(16) Part part[kChunkWarps][kRowParts];  // the factors of the block that the warp is at
  alignas(16) Scores scores[kBlocks];             // x q', all 16 x 16
  alignas(16) float decay[kChunkWarps][16];
};

// What follows the tokens. d_u: of keys 8 h + 2 q and the next, over the lane's tokens. flow, d_w: of key `channel`.
struct RowSums {
  float d_u[2][2], flow, d_w;
};

template <class T>
__device__ __forceinline__ void start_row_tile(RowsShared<T>& shared, const Scan<T>& s, const Segments& g,
                                               const Walk& walk) {
  start_rows(shared.p, s.p, walk);
  start_rows(shared.q, s.q, walk);
  start_rows(shared.x, s.x, walk);
  if (!g.constant) start_rows(shared.w, static_cast<const T*>(s.w), walk);
}

// The warp's block of the tile: x q'.
template <class T>
__device__ __forceinline__ void score_rows(RowsShared<T>& shared, const Lane& at) {
  const T* const x = shared.x + at.warp * kBlockTokens * kRow;
  const T* const q = shared.q + (at.warp * kBlockTokens + at.g) * kRow;
  Sums sums[2] = {}, more[2] = {};
#pragma unroll
  for (int j = 0; j < kWide; j += 8) {
    Left left;
    Right right[2];
    load_left(left, x + j, kRow, at);
    load_right(right[0], q + j, at);
    load_right(right[1], q + 8 * kRow + j, at);
    multiply<true, 2, kExact<T>, kExact<T>>(
        [&](int h) { return TileProduct{sums[h], more[h], left, {right[h][0], right[h][1]}}; });
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int h = i / 4, e = i % 4, row = at.g + e / 2 * 8, column = 8 * h + 2 * at.q + e % 2;
    shared.scores[at.warp][row * kScoreRow + column] = sums[h][e] + more[h][e];
  }
}

// Of the warp's 16 keys, for a block.
template <class T>
__device__ __forceinline__ void decay_rows(RowsShared<T>& shared, const Segments& g, const Walk& walk, float fixed,
                                           int block, const Lane& at) {
  const int first = block * kBlockTokens + at.half * 8;
  float w[8];
  load_raw(w, shared.w + first * kRow + at.warp * 16 + at.channel, g.constant, fixed, walk.left() - first);
  const Factors f = find_factors(w, at.half);
  float* const to = shared.part[at.warp][0] + at.half * 8 * kPartRow + at.channel;
  constexpr int kPart = kBlockTokens * kPartRow;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    to[i * kPartRow + kEnter * kPart] = f.enter[i];
    to[i * kPartRow + kLeave * kPart] = f.leave[i];
    to[i * kPartRow + kEight * kPart] = f.eight[i];
    to[i * kPartRow + kFour * kPart] = f.four[i];
    to[i * kPartRow + kTwo * kPart] = f.two[i];
  }
  if (at.half == 0) shared.decay[at.warp][at.channel] = f.all;
}

// found += what the block's tokens at `level` do: scores of pairs, p and out with the factors of the level.
template <int level, class T>
__device__ __forceinline__ void add_level(Sums (&found)[2], const RowsShared<T>& shared, const T* p, int block,
                                          const Lane& at) {
  const float* const factor = shared.part[at.warp][level == 8 ? kEight : level == 4 ? kFour : kTwo];
  const float* const scores = shared.scores[block];
  Left left;
  Right right[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int token = lower_token(level, at.q + 4 * i);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = at.g + 8 * h, column = at.g + 8 * h;
      left[2 * i + h] = is_pair(level, row, token) ? scores[row * kScoreRow + token] : 0.0f;
      const float value = static_cast<float>(p[token * kRow + column]);
      right[h][i] = level == 1 ? value : value * factor[token * kPartRow + column];
    }
  }
  Sums sums[2] = {};
  multiply<true, 2>([&](int h) { return TileProduct{sums[h], sums[h], left, {right[h][0], right[h][1]}}; });
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int h = i / 4, e = i % 4, row = at.g + e / 2 * 8, column = 8 * h + 2 * at.q + e % 2;
    found[h][e] += level == 1 ? sums[h][e] : factor[row * kPartRow + column] * sums[h][e];
  }
}

// out of a block without the bonus, in `found`.
template <class T>
__device__ __forceinline__ void find_rows(Sums (&found)[2], const RowsShared<T>& shared, const Sums (&m)[8], int block,
                                          const Lane& at) {
  Sums more[2] = {};
  read_state<true>(found, more, m, shared.x + block * kBlockTokens * kRow, at);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int h = i / 4, e = i % 4, row = at.g + e / 2 * 8, column = 8 * h + 2 * at.q + e % 2;
    found[h][e] = (found[h][e] + more[h][e]) * shared.part[at.warp][kEnter][row * kPartRow + column];
  }
  const T* const p = shared.p + block * kBlockTokens * kRow + at.warp * 16;
  add_level<8>(found, shared, p, block, at);
  add_level<4>(found, shared, p, block, at);
  add_level<2>(found, shared, p, block, at);
  add_level<1>(found, shared, p, block, at);
}

// Writes out, with the bonus, and found z: for the other scan, or where the level 2 was, for flow_rows().
template <class Kind, class T>
__device__ __forceinline__ void write_rows(RowSums& sums, const Sums (&found)[2], RowsShared<T>& shared,
                                           const Scan<T>& s, const Walk& walk, const float2 (&u)[2], int block,
                                           const Lane& at) {
  if constexpr (Kind::reverse) __syncwarp();  // the factors have been read
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int token = at.g + e * 4, row = block * kBlockTokens + token;
    const bool inside = row < walk.left();
    const float bonus = shared.scores[block][token * (kScoreRow + 1)];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = 8 * h + 2 * at.q;
      const int64_t to = walk.at(row) + at.warp * 16 + column;
      const float2 p = load_pair(shared.p + row * kRow + at.warp * 16 + column);
      const float2 z = inside ? load_pair(s.z + to) : float2{0.0f, 0.0f};
      const float a = found[h][e] * z.x, b = found[h][e + 1] * z.y;
      if (inside) store_pair(s.out + to, found[h][e] + u[h].x * p.x * bonus, found[h][e + 1] + u[h].y * p.y * bonus);
      if constexpr (Kind::reverse) {
        store_pair(shared.part[at.warp][kTwo] + token * kPartRow + column, a, b);
      } else {
        if (inside) store_pair(s.product + to, a, b);
        sums.d_u[h][0] += z.x * p.x * bonus, sums.d_u[h][1] += z.y * p.y * bonus;
      }
    }
  }
}

// With F = sum over values of dS S after a token: the log-decay has F - k d_k, and before the token F is that + r d_r.
template <class T>
__device__ __forceinline__ void flow_rows(RowSums& sums, const RowsShared<T>& shared, const Scan<T>& s,
                                          const Segments& g, const Walk& walk, float fixed, int block, const Lane& at) {
  const int first = block * kBlockTokens + at.half * 8, n = walk.left() - first;
  const int column = at.warp * 16 + at.channel;
  const float* const own = shared.part[at.warp][kTwo] + at.half * 8 * kPartRow + at.channel;
  float w[8], other[8], change = 0.0f;
  load_raw(w, shared.w + first * kRow + column, g.constant, fixed, n);
  const float* const products = s.product + walk.at(first) + column;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    other[i] = i < n ? products[i * walk.stride] : 0.0f;
    change += other[i] - own[i * kPartRow];
  }
  const float there = __shfl_xor_sync(kAllLanes, change, 16);
  float flow = sums.flow + (at.half ? there : 0.0f);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float log_decay = -exp2_fast(1.44269504f * w[i]), d_log = flow - own[i * kPartRow];
    // Below that d_log, which has the decay as a factor, is less than what the sums are off.
    const float d_w = log_decay > -16.0f ? d_log * log_decay : 0.0f;
    if (i < n && !g.constant) s.d_w[walk.at(first + i) + column] = static_cast<T>(d_w);
    sums.d_w += d_w;
    flow = d_log + other[i];
  }
  sums.flow += at.half ? there + change : change + there;
}

// M's own product with the state after the segment's last token, which stands in memory: over values, for each key.
template <class T>
__device__ __forceinline__ float first_flow(Sums (&m)[8], RowsShared<T>& shared, const Scan<T>& s, const Segments& g,
                                            const Walk& walk, const Lane& at) {
  const bool end = walk.segment == g.count - 1;
  const float* const state =
      end ? s.last + walk.block * kWide * kWide : g.after + (walk.block * (g.count - 1) + walk.segment) * kWide * kWide;
  float sums[2] = {};
  each_of_state(m, at, [&](float& x, int row, int column) {
    sums[(row - at.g) / 8 % 2] += x * state[state_index<true>(row, column)];
  });
  float* const to = shared.part[at.warp][0];
  for (int i = 0; i < 2; i++) {
    const float sum = reduce_lanes<4>(sums[i], Add{});
    if (at.q == 0) to[at.g + 8 * i] = sum;
  }
  __syncwarp();
  const float flow = to[at.channel];
  __syncwarp();
  return flow;
}

// The gradients of u, or of a w that is constant, of one segment.
template <class Kind>
__device__ __forceinline__ void write_sums(const RowSums& sums, const Segments& g, const Walk& walk, const Lane& at) {
  const int64_t place = (walk.block * g.count + walk.part) * kWide + at.warp * 16;
  if constexpr (Kind::reverse) {
    const float sum = sums.d_w + __shfl_xor_sync(kAllLanes, sums.d_w, 16);
    if (g.constant && at.half == 0) g.d_w_sum[place + at.channel] = sum;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = sums.d_u[i / 2][i % 2];
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (at.g == 0) g.d_u[place + i / 2 * 8 + 2 * at.q + i % 2] = sum;
    }
  }
}

template <class Kind, class T>
__device__ __forceinline__ void walk_rows(Sums (&m)[8], RowSums& sums, RowsShared<T>& shared, const Scan<T>& s,
                                          const Segments& g, const Walk& walk, float fixed, const float2 (&u)[2],
                                          const Lane& at) {
#pragma unroll 1
  for (int block = 0; block < kBlocks; block++) {
    __syncwarp();
    decay_rows(shared, g, walk, fixed, block, at);
    __syncwarp();
    Sums found[2] = {};
    find_rows(found, shared, m, block, at);
    write_rows<Kind>(sums, found, shared, s, walk, u, block, at);
    if constexpr (Kind::reverse) {
      __syncwarp();
      flow_rows(sums, shared, s, g, walk, fixed, block, at);
    }
    Left own[2];
    load_transposed(own, shared.p + block * kBlockTokens * kRow + at.warp * 16, at);
    const float decay[2] = {shared.decay[at.warp][at.g], shared.decay[at.warp][at.g + 8]};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = i / 4 * 8 + at.q + i / 2 % 2 * 4, column = at.g + i % 2 * 8;
      own[i / 4][i % 4] *= shared.part[at.warp][kLeave][token * kPartRow + column];
    }
    advance_state<true, false>(m, own, shared.q + block * kBlockTokens * kRow, at,
                               [&](int, int e) { return decay[e / 2]; });
  }
}

// A block of threads a sequence, head and segment.
template <class Kind, class T>
__global__ void __launch_bounds__(kChunkThreads) chunk_rows_kernel(const Scan<T> s, const Segments g) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowsShared<T>& shared = *reinterpret_cast<RowsShared<T>*>(memory);
  const Lane at = this_lane();
  Walk walk = walk_of<Kind>(s, g, g.count);
  start_row_tile(shared, s, g, walk);
  const int64_t keys = walk.head * kWide + at.warp * 16;
  const float fixed = g.constant ? static_cast<const float*>(s.w)[keys + at.channel] : 0.0f;
  const float* const bonus = s.u + keys + 2 * at.q;  // from anywhere in memory
  const float2 u[2] = {{bonus[0], bonus[1]}, {bonus[8], bonus[9]}};
  Sums m[8];
  RowSums sums = {};
  load_state<true>(m, s, g, walk, at);
  if constexpr (Kind::reverse) sums.flow = first_flow(m, shared, s, g, walk, at);
  while (true) {
    wait_for_copies();
    __syncthreads();
    score_rows(shared, at);
    __syncthreads();
    walk_rows<Kind>(m, sums, shared, s, g, walk, fixed, u, at);
    walk.done += kTileTokens;
    if (walk.done >= walk.tokens) break;
    __syncthreads();
    start_row_tile(shared, s, g, walk);
  }
  write_sums<Kind>(sums, g, walk, at);
  if (s.end != nullptr && walk.part == g.count - 1) store_state<true>(m, s.end + walk.block * kWide * kWide, at);
}

}  // namespace cog_rwkv

// Chunked scans where columns of M decay: y and d_v, and the states between segments. First each warp makes one block
// of a tile ready, then each walks over all four with its rows of M.
#pragma once

#include "decay_blocks.cuh"

namespace cog_rwkv {

template <class T>
struct ColumnsShared {
  alignas(16) Rows<T> p, q, x, w;
  alignas(16) Rows<float> entering, leaving;  // x and q with the decays from the block's begin and to its end
  alignas(16) Part part[kChunkWarps][3];      // of q in the lower and x in the upper halves, at levels 8, 4, 2
  alignas(16) Scores scores[kBlocks];
  alignas(16) float decay[kBlocks][kWide];
};

// All but p, which is read to the end of a tile: the others may come while the last tile is at work.
template <bool outputs, class T>
__device__ __forceinline__ void start_columns(ColumnsShared<T>& shared, const Scan<T>& s, const Segments& g,
                                              const Walk& walk) {
  start_rows(shared.q, s.q, walk);
  if (outputs) start_rows(shared.x, s.x, walk);
  if (!g.constant) start_rows(shared.w, static_cast<const T*>(s.w), walk);
}

// Decays a lane's 8 tokens of one channel. bonus: u q x, added up.
template <bool split, bool outputs, class T>
__device__ __forceinline__ void decay_channel(ColumnsShared<T>& shared, const Factors& f, float u, float (&bonus)[8],
                                              int channel, const Lane& at) {
  const int first = at.half * 8, corner = at.warp * kBlockTokens * kRow + channel;
  float* const part = shared.part[at.warp][0] + first * kPartRow + at.channel;
  constexpr int kLevel = kBlockTokens * kPartRow;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int to = corner + (first + i) * kRow;
    const float q = static_cast<float>(shared.q[to]);
    shared.leaving[to] = operand<split>(q * f.leave[i]);
    if constexpr (outputs) {
      const float x = static_cast<float>(shared.x[to]);
      shared.entering[to] = operand<split>(x * f.enter[i]);
      bonus[i] += u * q * x;
      part[i * kPartRow] = operand<split>((at.half ? x : q) * f.eight[i]);
      part[i * kPartRow + kLevel] = operand<split>((i & 4 ? x : q) * f.four[i]);
      part[i * kPartRow + 2 * kLevel] = operand<split>((i & 2 ? x : q) * f.two[i]);
    }
  }
}

// scores[level] += x q' over 16 channels, for the 8 tokens that are q there.
template <bool split, class T>
__device__ __forceinline__ void score_channels(Sums (&scores)[4], const ColumnsShared<T>& shared, int channel,
                                               const Lane& at) {
  const T* const x = shared.x + at.warp * kBlockTokens * kRow + channel;
  const T* const q = shared.q + at.warp * kBlockTokens * kRow + channel;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    Left left[4];
    Right right[4];
#pragma unroll
    for (int l = 0; l < 3; l++) {
      const float* part = shared.part[at.warp][l] + k;
      load_left(left[l], part, kPartRow, at);
      load_right(right[l], part + lower_token(8 >> l, at.g) * kPartRow, at);
    }
    load_left(left[3], x + k, kRow, at);
    load_right(right[3], q + k + lower_token(1, at.g) * kRow, at);
    multiply<split, 4>([&](int l) { return TileProduct{scores[l], scores[l], left[l], {right[l][0], right[l][1]}}; });
  }
}

// Every pair has one level; the bonus is a token's own.
template <bool split>
__device__ __forceinline__ void put_scores(float* to, const Sums (&scores)[4], float (&bonus)[8], const Lane& at) {
  for (int i = at.lane; i < kBlockTokens * kScoreRow; i += 32) to[i] = 0.0f;
  __syncwarp();
#pragma unroll
  for (int l = 0; l < 4; l++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = at.g + e / 2 * 8, column = lower_token(8 >> l, 2 * at.q + e % 2);
      if (is_pair(8 >> l, row, column)) to[row * kScoreRow + column] = operand<split>(scores[l][e]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float sum = reduce_lanes<16>(bonus[i], Add{});
    if (at.channel == i) to[(at.half * 8 + i) * (kScoreRow + 1)] = operand<split>(sum);
  }
}

// The warp's block of the tile.
template <bool split, bool outputs, class T>
__device__ __forceinline__ void prepare_columns(ColumnsShared<T>& shared, const Scan<T>& s, const Segments& g,
                                                const Walk& walk, const Lane& at) {
  const int first = at.warp * kBlockTokens + at.half * 8, n = walk.left() - first;
  Sums scores[4] = {};
  float bonus[8] = {};
#pragma unroll 1
  for (int begin = 0; begin < kWide; begin += 16) {
    const int channel = begin + at.channel;
    const int64_t shared_channel = walk.head * kWide + channel;
    const float fixed = g.constant ? static_cast<const float*>(s.w)[shared_channel] : 0.0f;
    float w[8];
    load_raw(w, shared.w + first * kRow + channel, g.constant, fixed, n);
    const Factors f = find_factors(w, at.half);
    if (at.half == 0) shared.decay[at.warp][channel] = f.all;
    decay_channel<split, outputs>(shared, f, outputs ? s.u[shared_channel] : 0.0f, bonus, channel, at);
    if constexpr (outputs) {
      __syncwarp();
      score_channels<split>(scores, shared, begin, at);
      __syncwarp();
    }
  }
  if constexpr (outputs) put_scores<split>(shared.scores[at.warp], scores, bonus, at);
}

// out of a block: what M gives, and what its own tokens do.
template <bool split, class T>
__device__ __forceinline__ void write_columns(const ColumnsShared<T>& shared, const Sums (&m)[8], const Left (&p)[2],
                                              const Scan<T>& s, const Walk& walk, int block, const Lane& at) {
  Sums found[2] = {}, more[2] = {};
  read_state<split>(found, more, m, shared.entering + block * kBlockTokens * kRow, at);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float* const from = shared.scores[block] + at.g * kScoreRow + half * 8 + at.q;
    const Left scores = {from[0], from[8 * kScoreRow], from[4], from[8 * kScoreRow + 4]};
    multiply<split, 2, false, kExact<T>>(
        [&](int h) { return TileProduct{found[h], more[h], scores, {p[half][h], p[half][2 + h]}}; });
  }
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int row = block * kBlockTokens + at.g + e * 4;
    if (row >= walk.left()) continue;
    T* const to = s.out + walk.at(row) + at.warp * 16 + 2 * at.q;
#pragma unroll
    for (int h = 0; h < 2; h++) store_pair(to + 8 * h, found[h][e] + more[h][e], found[h][e + 1] + more[h][e + 1]);
  }
}

template <bool split, bool outputs, class T>
__device__ __forceinline__ void walk_columns(Sums (&m)[8], const ColumnsShared<T>& shared, const Scan<T>& s,
                                             const Walk& walk, const Lane& at) {
  const T* const p = shared.p + at.warp * 16;
#pragma unroll 1
  for (int block = 0; block < kBlocks; block++) {
    Left own[2];
    load_transposed(own, p + block * kBlockTokens * kRow, at);
    if constexpr (outputs) write_columns<split>(shared, m, own, s, walk, block, at);
    const float* const decay = shared.decay[block] + 2 * at.q;
    advance_state<split, kExact<T>>(m, own, shared.leaving + block * kBlockTokens * kRow, at,
                                    [&](int j, int e) { return decay[j * 8 + e % 2]; });
  }
}

// A block of threads a sequence, head and segment. Without `outputs` M begins as 0 and goes to g.states, with the decay
// of the whole segment; the last segment of the scan is left out.
template <class Kind, class T, bool split, bool outputs>
__global__ void __launch_bounds__(kChunkThreads, 2) chunk_columns_kernel(const Scan<T> s, const Segments g) {
  extern __shared__ __align__(16) unsigned char memory[];
  ColumnsShared<T>& shared = *reinterpret_cast<ColumnsShared<T>*>(memory);
  const Lane at = this_lane();
  const int parts = outputs ? g.count : g.count - 1;
  Walk walk = walk_of<Kind>(s, g, parts);
  Sums m[8] = {};
  float all = 1.0f;  // the segment's decay of column threadIdx.x
  if constexpr (outputs) load_state<false>(m, s, g, walk, at);
  start_columns<outputs>(shared, s, g, walk);
  while (walk.done < walk.tokens) {
    wait_for_copies();
    __syncthreads();
    start_rows(shared.p, s.p, walk);
    prepare_columns<split, outputs>(shared, s, g, walk, at);
    wait_for_copies();
    __syncthreads();
    Walk next = walk;
    next.done += kTileTokens;
    if (next.done < next.tokens) start_columns<outputs>(shared, s, g, next);
    if (!outputs && threadIdx.x < kWide) {
      for (int block = 0; block < kBlocks; block++) all *= shared.decay[block][threadIdx.x];
    }
    walk_columns<split, outputs>(m, shared, s, walk, at);
    walk = next;
  }
  const int64_t place = walk.block * parts + walk.part;
  if constexpr (!outputs) {
    store_state<false>(m, g.states + place * kWide * kWide, at);
    if (threadIdx.x < kWide) g.decays[place * kWide + threadIdx.x] = all;
  } else if (s.end != nullptr && walk.part == parts - 1) {
    store_state<false>(m, s.end + walk.block * kWide * kWide, at);
  }
}

}  // namespace cog_rwkv

// What the chunked scans share: 16 tokens of a head (a block), four blocks (a tile), and the decays inside a block.
//
// With i and j tokens of a block in the order of the scan, d_i their decays and M what stood there before the block,
//
//   out_i = (d_0 .. d_i-1) M x_i + sum over j < i of (d_j+1 .. d_i-1) (q_j x_i) p_j
//   M <- (d_0 .. d_15) M + sum over j of (d_j+1 .. d_15) p_j q_j'
//
// where decays multiply keys, in q and x or in p and out. A decay may be as small as 0, so nothing is divided: the
// pairs i > j are those of four levels, 8, 4, 2, 1. At level n the block falls into groups of 2 n tokens, with i in the
// upper and j in the lower half of the same group, and the middle of the group cuts d_j+1 .. d_i-1 into a factor of j
// and one of i. Every token has one factor a level, a product of decays, at most 1.
#pragma once

#include <cmath>

#include "cuda.cuh"
#include "decay_scan_args.h"
#include "fast_math.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace cog_rwkv {

constexpr int kBlockTokens = 16, kBlocks = 4, kTileTokens = kBlockTokens * kBlocks;
constexpr int kChunkWarps = 4, kChunkThreads = 32 * kChunkWarps;  // a warp has 16 rows of M
// From one row to the next, so that the lanes of a warp do not meet in a bank.
constexpr int kRow = kWide + 8, kScoreRow = 20, kPartRow = 24;

// float16 and bfloat16 as they are fit into tf32.
template <class T>
constexpr bool kExact = sizeof(T) == 2;

template <class T>
using Rows = T[kTileTokens * kRow];
using Scores = float[kBlockTokens * kScoreRow];  // of token i (row) with token j
using Part = float[kBlockTokens * kPartRow];     // 16 channels of a block

// A sequence is cut into `count` segments of `tokens` tokens, the last may have less.
struct Segments {
  int count;
  int64_t tokens;
  bool constant;         // w is [heads, 64]
  float* states;         // [batch heads, count - 1, value, key]: M before the second segment of the scan, and so on
  float* decays;         // [batch heads, count - 1, 64]: of a whole segment
  const float* after;    // like states: those of the scan for d_r, from the first token to the last
  float *d_u, *d_w_sum;  // [batch heads, count, 64]
};

struct Lane {
  int lane, warp;
  int g, q;           // as in mma.cuh
  int channel, half;  // where a lane has 8 tokens of a channel
};

__device__ __forceinline__ Lane this_lane() {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  return {lane, warp, lane / 4, lane % 4, lane % 16, lane / 16};
}

// A segment of a head, tokens in the order of the scan.
struct Walk {
  int64_t block, head;  // of batch heads; of heads
  int part, segment;    // in the order of the scan; in that of time
  int64_t first, stride, tokens, done;
  __device__ int left() const { return static_cast<int>(min(tokens - done, int64_t{kTileTokens})); }
  __device__ int64_t at(int i) const { return first + (done + i) * stride; }
};

template <class Kind, class T>
__device__ __forceinline__ Walk walk_of(const Scan<T>& s, const Segments& g, int parts) {
  Walk walk;
  walk.block = blockIdx.x / parts, walk.part = static_cast<int>(blockIdx.x % parts);
  const int64_t sequence = walk.block / s.heads;
  walk.head = walk.block % s.heads;
  walk.segment = Kind::reverse ? g.count - 1 - walk.part : walk.part;
  const int64_t begin = walk.segment * g.tokens;
  walk.tokens = min(g.tokens, s.tokens - begin);
  const int64_t t = Kind::reverse ? begin + walk.tokens - 1 : begin;
  walk.first = ((sequence * s.tokens + t) * s.heads + walk.head) * kWide;
  walk.stride = (Kind::reverse ? -1 : 1) * s.heads * kWide;
  walk.done = 0;
  return walk;
}

// Starts to copy the next tile; zeros behind the last token.
template <class T>
__device__ __forceinline__ void start_rows(T* to, const T* from, const Walk& walk) {
  constexpr int kPer16 = 16 / sizeof(T), kPieces = kWide / kPer16, kStep = kChunkThreads / kPieces;
  const int n = walk.left(), row = static_cast<int>(threadIdx.x) / kPieces;
  const int column = static_cast<int>(threadIdx.x) % kPieces * kPer16;
  const T* at = from + walk.at(row) + column;
#pragma unroll
  for (int i = 0; i < kTileTokens; i += kStep) {
    const bool inside = row + i < n;
    copy16(to + (row + i) * kRow + column, inside ? at : from, inside);
    at += kStep * walk.stride;
  }
}

template <class T>
__device__ __forceinline__ float2 load_pair(const T* from) {
  const Vector<T, 2> v = load_vector<T, 2>(from);
  return {static_cast<float>(v.values[0]), static_cast<float>(v.values[1])};
}

template <class T>
__device__ __forceinline__ void store_pair(T* to, float a, float b) {
  store_vector<T, 2>(to, {static_cast<T>(a), static_cast<T>(b)});
}

// Rows g and g + 8 from `rows` on, 8 columns, in the order that the columns of M have as an operand: 0, 2, 4, 6, 1, 3,
// 5, 7. `right_row` is the same for one row.
template <class T>
__device__ __forceinline__ void load_left(Left& to, const T* rows, int stride, const Lane& at) {
  const float2 a = load_pair(rows + at.g * stride + 2 * at.q), b = load_pair(rows + (at.g + 8) * stride + 2 * at.q);
  to[0] = a.x, to[1] = b.x, to[2] = a.y, to[3] = b.y;
}

template <class T>
__device__ __forceinline__ void load_right(Right& to, const T* row, const Lane& at) {
  const float2 a = load_pair(row + 2 * at.q);
  to[0] = a.x, to[1] = a.y;
}

// f(m, row, column) for the lane's part of M.
template <class F>
__device__ __forceinline__ void each_of_state(Sums (&m)[8], const Lane& at, F f) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) f(m[j][e], at.warp * 16 + at.g + e / 2 * 8, j * 8 + 2 * at.q + e % 2);
  }
}

// Of a state in memory, which is [value, key].
template <bool rows>
__device__ __forceinline__ int state_index(int row, int column) {
  return rows ? column * kWide + row : row * kWide + column;
}

template <bool rows, class T>
__device__ __forceinline__ void load_state(Sums (&m)[8], const Scan<T>& s, const Segments& g, const Walk& walk,
                                           const Lane& at) {
  const float* from = walk.part == 0 ? s.begin + walk.block * kWide * kWide
                                     : g.states + (walk.block * (g.count - 1) + walk.part - 1) * kWide * kWide;
  each_of_state(m, at, [&](float& x, int row, int column) { x = from[state_index<rows>(row, column)]; });
}

template <bool rows>
__device__ __forceinline__ void store_state(Sums (&m)[8], float* to, const Lane& at) {
  each_of_state(m, at, [&](float& x, int row, int column) { to[state_index<rows>(row, column)] = x; });
}

// found[h] += x M', for 16 tokens and rows 8 h to 8 h + 7 of the warp's 16 rows of M. Two chains of sums.
template <bool split, class T>
__device__ __forceinline__ void read_state(Sums (&found)[2], Sums (&more)[2], const Sums (&m)[8], const T* x,
                                           const Lane& at) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    Left left;
    load_left(left, x + j * 8, kRow, at);
    multiply<split, 2, kExact<T>>([&](int h) {
      return TileProduct{j % 2 ? more[h] : found[h],
                         j % 2 ? found[h] : more[h],
                         left,
                         {operand<split>(m[j][2 * h]), operand<split>(m[j][2 * h + 1])}};
    });
  }
}

// m <- m decay(j, e) + p' q for 16 tokens: `p` is what each lane has of the warp's 16 columns of p, transposed; e as in
// Sums, of columns 8 j to 8 j + 7. Tensor cores cut their sums off, so m itself, which goes on, is no sum of theirs.
template <bool split, bool exact_p, class T, class F>
__device__ __forceinline__ void advance_state(Sums (&m)[8], const Left (&p)[2], const T* q, const Lane& at, F decay) {
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    Sums sums[4] = {};
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const T* from = q + (8 * s + at.q) * kRow + first * 8 + at.g;
      multiply<split, 4, exact_p, kExact<T>>([&](int j) {
        const float low = static_cast<float>(from[j * 8]), high = static_cast<float>(from[4 * kRow + j * 8]);
        return TileProduct{sums[j], sums[j], p[s], {low, high}};
      });
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int j = i / 4, e = i % 4;
      m[first + j][e] = fmaf(m[first + j][e], decay(first + j, e), sums[j][e]);
    }
  }
}

// Tokens 8 s + q and 8 s + q + 4, columns g and g + 8 from `from` on.
template <class T>
__device__ __forceinline__ void load_transposed(Left (&to)[2], const T* from, const Lane& at) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int token = i / 4 * 8 + at.q + i / 2 % 2 * 4, column = at.g + i % 2 * 8;
    to[i / 4][i % 4] = static_cast<float>(from[token * kRow + column]);
  }
}

// The n-th of the 8 tokens that are in the lower half of their group at this level.
__device__ __forceinline__ int lower_token(int level, int n) { return n / level * 2 * level + n % level; }

__device__ __forceinline__ bool is_pair(int level, int i, int j) {  // j is from lower_token()
  return i / (2 * level) == j / (2 * level) && i % (2 * level) >= level;
}

// Of 8 tokens of a channel, beginning with the one at `from`, or all the same: `fixed`. From the n-th on no decay.
template <class T>
__device__ __forceinline__ void load_raw(float (&w)[8], const T* from, bool constant, float fixed, int n) {
  if (constant) {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = fixed;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = static_cast<float>(from[i * kRow]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = i < n ? w[i] : -INFINITY;
}

// The factors of a lane's 8 tokens: to read what stood before the block, to stay until its end, and of each level but
// the last, which has none.
struct Factors {
  float enter[8], leave[8], eight[8], four[8], two[8], all;
};

// w: raw. exp(-exp(w)) = 2^-rate with rate = 2^(w log2 e + log2 log2 e). The errors of decays near 1 would add up from
// token to token, so the decay of the whole block comes from the sum of rates.
__device__ __forceinline__ Factors find_factors(const float (&w)[8], bool upper) {
  float d[8], rates = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float rate = exp2_fast(fmaf(w[i], 1.44269504f, 0.52876637f));
    d[i] = exp2_fast(-rate);
    rates += rate;
  }
  Factors f;
  float before[8], behind[8];
  before[0] = behind[7] = 1.0f;
#pragma unroll
  for (int i = 1; i < 8; i++) {
    before[i] = before[i - 1] * d[i - 1];
    behind[7 - i] = behind[8 - i] * d[8 - i];
  }
  const float other_rates = __shfl_xor_sync(kAllLanes, rates, 16), other = exp2_fast(-other_rates);
  const float from_begin = upper ? other : 1.0f, to_end = upper ? 1.0f : other;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    f.enter[i] = from_begin * before[i];
    f.leave[i] = behind[i] * to_end;
    f.eight[i] = upper ? before[i] : behind[i];
    const int base = i / 4 * 4;
    f.two[i] = i % 4 == 0 ? d[base + 1] : i % 4 == 3 ? d[base + 2] : 1.0f;
  }
  f.four[3] = f.four[4] = 1.0f;
  f.four[2] = d[3], f.four[1] = d[3] * d[2], f.four[0] = f.four[1] * d[1];
  f.four[5] = d[4], f.four[6] = d[4] * d[5], f.four[7] = f.four[6] * d[6];
  f.all = exp2_fast(-(rates + other_rates));
  return f;
}

}  // namespace cog_rwkv

// wkv7 in chunks, the part that needs no state: chunked.cuh has the formulas.
#pragma once

#include "../csrc/math.h"
#include "slot.cuh"

namespace cog_rwkv {

// Two warps share a slot's work: `part` is which of them this is.
struct Team {
  int barrier, part, lane;
  __device__ __forceinline__ void sync() const { sync_pair(barrier); }
};

// Where a row of 16-bit inputs begins, for the banks: a warp reads 16 floats each of rows t and t + 8 at once.
__device__ __forceinline__ constexpr int stand_off(int row) { return row / 8 * 16; }

// Starts copying n tokens of a head, from input `kFirst` on; zeros for the rest of the chunk. Of v, the values first to
// first + count alone.
template <int kFirst, class T>
__device__ __forceinline__ void start_copies(const T* const (&in)[6], int64_t heads, const Slot& slot, int64_t token,
                                             int n, int64_t head, int first, int count, Team team) {
  constexpr int kPer16 = 16 / sizeof(T), kPieces = static_cast<int>(kHead) / kPer16, kRows = 2 * kWarp / kPieces;
  const int thread = team.part * kWarp + team.lane, column = thread % kPieces * kPer16;
  const bool mine = column >= first && column < first + count;
#pragma unroll
  for (int row = thread / kPieces, i = 0; i < kChunk / kRows; i++, row += kRows) {
    const bool inside = row < n;
    const int64_t at = ((token + (inside ? row : 0)) * heads + head) * kHead + column;
    const int to = sizeof(T) == 4 ? place(column) : thread % kPieces * 4 + stand_off(row);
#pragma unroll
    for (int input = kFirst; input < 6; input++) {
      if (input != kV) copy16(slot.row(input, row) + to, in[input] + at, inside);
    }
    if (mine) copy16(slot.values<T>(row) + column, in[kV] + at, inside);
  }
}

// A half of the warp has 8 tokens, the lanes in it two keys each, the part of the team 32 of them.
struct Corner {
  int token, key;
};

template <class T>
__device__ __forceinline__ Vector<T, 2> raw(const Slot& slot, int input, int t, Corner c) {
  const float* row = slot.row(input, c.token + t) + (sizeof(T) == 4 ? place(c.key) : c.key / 2 + stand_off(c.token));
  return load_vector<T, 2>(reinterpret_cast<const T*>(row));
}

// log2 of the decay: -e^-0.5 / ln 2 times the sigmoid of w.
constexpr float kLog2Decay = -0.87503876f;

__device__ __forceinline__ float sigmoid_of(float w) { return reciprocal_fast(1.0f + exp2_fast(-1.44269504f * w)); }

__device__ __forceinline__ float log2_decay(float w) { return kLog2Decay * sigmoid_of(w); }

// e^(g - m) of the lane's tokens and keys, and in factor[0] that of the token before. g is counted from the middle of
// the chunk, so each half knows its own. Tokens past n do not decay.
template <class T>
__device__ __forceinline__ void sum_decays(float (&factor)[9][2], const Slot& slot, int n, Corner c) {
  factor[0][0] = factor[0][1] = 0.0f;
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const Vector<T, 2> w = raw<T>(slot, kW, t, c);
    const float rate = c.token + t < n ? kLog2Decay : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) factor[t + 1][i] = factor[t][i] + rate * sigmoid_of(static_cast<float>(w.values[i]));
  }
  const float first = 1.0f - 0.125f * static_cast<float>(c.token);  // 1 in the first half, 0 in the second: no branch
  float whole[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float total = factor[8][i];
    whole[i] = exp2_fast(total);
#pragma unroll
    for (int t = 0; t < 9; t++) factor[t][i] = exp2_fast(factor[t][i] - first * total);
  }
  // after() lies behind before().
  float2_at(slot.before() + c.token / 8 * kHead + c.key) = make_float2(whole[0], whole[1]);
}

// Scales inputs by factor(which of them, t, i), and makes them operands.
template <class T, bool split, int count, class Factor>
__device__ __forceinline__ void scale(const Slot& slot, const Input (&inputs)[count], Corner c, Team team,
                                      Factor factor) {
  Vector<T, 2> x[count][8];
#pragma unroll
  for (int t = 0; t < 8; t++) {
#pragma unroll
    for (int which = 0; which < count; which++) x[which][t] = raw<T>(slot, inputs[which], t, c);
  }
  if (sizeof(T) == 2) team.sync();  // what this lane writes, another one reads
#pragma unroll
  for (int which = 0; which < count; which++) {
#pragma unroll
    for (int t = 0; t < 8; t++) {
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        y[i] = operand<split>(static_cast<float>(x[which][t].values[i]) * factor(which, t, i));
      float2_at(slot.row(inputs[which], c.token + t) + place(c.key)) = make_float2(y[0], y[1]);
    }
  }
}

// Of all but the first.
__device__ __forceinline__ void reciprocals(float (&factor)[9][2]) {
#pragma unroll
  for (int t = 1; t < 9; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) factor[t][i] = reciprocal_fast(factor[t][i]);
  }
}

template <class T, bool split>
__device__ __forceinline__ void scale_inputs(const Slot& slot, int n, Team team) {
  const Corner c{team.lane / 16 * 8, team.part * 32 + team.lane % 16 * 2};
  float factor[9][2];
  sum_decays<T>(factor, slot, n, c);
  scale<T, split>(slot, {kR, kA}, c, team, [&](int before, int t, int i) { return factor[t + 1 - before][i]; });
  reciprocals(factor);
  scale<T, split>(slot, {kK, kB}, c, team, [&](int, int t, int i) { return factor[t + 1][i]; });
  team.sync();
}

constexpr int kLowerRow = 20;  // of L transposed, for the banks

// Stores tokens by tokens, [half]: the columns 8 half to 8 half + 7. The lower triangle, or the upper, with its
// diagonal or without.
template <bool split, bool upper = false>
__device__ __forceinline__ void store_lower(float* small, const Sums (&x)[2], bool diagonal, int lane) {
  const int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = g + 8 * i, at = 8 * half + column;
      const auto keep = [&](int to) { return (upper ? to > row : to < row) || (to == row && diagonal); };
      const float first = keep(at) ? x[half][2 * i] : 0.0f, second = keep(at + 1) ? x[half][2 * i + 1] : 0.0f;
      *reinterpret_cast<float2*>(small + row * kSmallRow + at) =
          make_float2(operand<split>(first), operand<split>(second));
    }
  }
}

// A token as the first, the last as number 0: what makes an upper triangle a lower one.
template <bool reverse>
__device__ __forceinline__ constexpr int turned(int token) {
  return reverse ? kChunk - 1 - token : token;
}

// The lower triangle, or `reverse` the upper, turned; without its diagonal, transposed.
template <bool reverse = false>
__device__ __forceinline__ void store_lower_transposed(float* lower, const Sums (&x)[2], int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = turned<reverse>(g + i / 2 * 8), column = turned<reverse>(8 * half + 2 * q + i % 2);
      lower[column * kLowerRow + row] = column < row ? x[half][i] : 0.0f;
    }
  }
  __syncwarp();
}

// a~ b~' transposed into `lower`, and a~ k~', r~ b~' and r~ k~': their triangles. A part of the team has a~, one r~.
template <bool split>
__device__ __forceinline__ void between_tokens(const Slot& slot, float* lower, Team team) {
  const int g = team.lane / 4, q = team.lane % 4;
  const bool reads = team.part == 1;
  const float* left = slot.row(reads ? kR : kA, g) + place(16 * q);
  Sums with_b[2] = {}, with_k[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {  // four keys of this lane: two steps of eight for the warp
    const auto keys = [&](int input, int half) {
      return float4_at(slot.row(input, g + 8 * half) + place(16 * q) + 4 * i);
    };
    const float4 x[2] = {float4_at(left + 4 * i), float4_at(left + 8 * kRow + 4 * i)};
    const float4 b[2] = {keys(kB, 0), keys(kB, 1)}, k[2] = {keys(kK, 0), keys(kK, 1)};
    const Left x_left[2] = {{x[0].x, x[1].x, x[0].y, x[1].y}, {x[0].z, x[1].z, x[0].w, x[1].w}};
#pragma unroll
    for (int step = 0; step < 2; step++) {
      multiply<split, 4>([&](int j) -> TileProduct {
        const int half = j % 2;
        Sums& sums = j < 2 ? with_b[half] : with_k[half];
        const float4 y = j < 2 ? b[half] : k[half];
        return {sums, sums, x_left[step], {step ? y.z : y.x, step ? y.w : y.y}};
      });
    }
  }
  store_lower<split>(reads ? slot.seen() : slot.removed(), with_k, reads, team.lane);
  if (reads) {
    store_lower<split>(slot.seen_removed(), with_b, true, team.lane);
    return;
  }
  store_lower_transposed(lower, with_b, team.lane);
}

// (I - L)^-1 for L transposed in `lower`, which may lie where the result goes, `reverse`: turned. A lane has a column,
// both halves the same.
template <bool split, bool reverse = false>
__device__ __forceinline__ void invert(float* result, const float* lower, int lane) {
  const int column = lane % 16;
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i++) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j + 1 < kChunk; j++) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < kChunk; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + j * kLowerRow + i);
      if (i > j) x[i] += l.x * x[j];
      if (i + 1 > j) x[i + 1] += l.y * x[j];
      if (i + 2 > j) x[i + 2] += l.z * x[j];
      x[i + 3] += l.w * x[j];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = lane < 16 ? i : i + 8;
    result[turned<reverse>(row) * kSmallRow + turned<reverse>(column)] = operand<split>(lane < 16 ? x[i] : x[i + 8]);
  }
  __syncwarp();
}

// T a~ in the place of a~, T tril(a~ k~', -1) in the place of the triangle: half of the columns for a part of the team.
template <bool split>
__device__ __forceinline__ void apply_inverse(const Slot& slot, Team team) {
  const int g = team.lane / 4, q = team.lane % 4;
  float* const small = slot.removed() + 8 * team.part;
  Sums narrow = {}, wide[4] = {};
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const float2 top = load_tokens(slot.inverse(), g, step, q), bottom = load_tokens(slot.inverse(), g + 8, step, q);
    const Left t = {top.x, bottom.x, top.y, bottom.y};
    const int token = 8 * step + 2 * q;
    const float* keys = small + token * kSmallRow + g;
    float first[4], second[4];
    load_columns(first, slot.row(kA, token), team.part, g);
    load_columns(second, slot.row(kA, token + 1), team.part, g);
    multiply<split, 1>([&](int) -> TileProduct { return {narrow, narrow, t, {keys[0], keys[kSmallRow]}}; });
    multiply<split, 4>([&](int j) -> TileProduct { return {wide[j], wide[j], t, {first[j], second[j]}}; });
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = g + 8 * i;
    float2_at(small + row * kSmallRow + 2 * q) =
        make_float2(operand<split>(narrow[2 * i]), operand<split>(narrow[2 * i + 1]));
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const auto at = [&](int j) { return operand<split>(wide[j][2 * i + odd]); };
      float4_at(slot.row(kA, row) + place(16 * q) + first_key(team.part, odd)) =
          make_float4(at(0), at(1), at(2), at(3));
    }
  }
  __syncwarp();
}

// All that a chunk of n tokens gives, where its inputs are.
template <class T, bool split>
__device__ __forceinline__ void make_chunk(const Slot& slot, int n, Team team) {
  scale_inputs<T, split>(slot, n, team);
  float* lower = slot.inverse();
  between_tokens<split>(slot, lower, team);
  if (team.part == 0) invert<split>(slot.inverse(), lower, team.lane);
  team.sync();
  apply_inverse<split>(slot, team);
}

}  // namespace cog_rwkv

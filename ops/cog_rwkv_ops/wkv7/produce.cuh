// wkv7 in chunks, the part that needs no state: chunked.cuh has the formulas.
#pragma once

#include "../csrc/math.h"
#include "slot.cuh"

namespace cog_rwkv {

// Starts copying n tokens of a head; zeros for the rest of the chunk. Of v, the values first to first + count alone.
template <class T>
__device__ __forceinline__ void start_copies(const Wkv7<T, void>& p, const Slot& slot, int64_t token, int n,
                                             int64_t head, int first, int count, int lane) {
  constexpr int kPer16 = 16 / sizeof(T), kPieces = static_cast<int>(kHead) / kPer16;
  for (int i = lane; i < kChunk * kPieces; i += kWarp) {
    const int row = i / kPieces, piece = i % kPieces, column = piece * kPer16;
    const bool inside = row < n;
    const int64_t at = ((token + (inside ? row : 0)) * p.heads + head) * kHead + column;
    // Inputs in float32 are scaled where they are, but v: that stays as it came.
    const int to = row * kRow + (sizeof(T) == 4 ? place(column) : piece * 4);
#pragma unroll
    for (int input = 0; input < 6; input++) {
      if (input == kV) continue;
      copy16(slot.matrix(input) + to, p.in[input] + at, inside);
    }
    if (column >= first && column < first + count)
      copy16(slot.matrix(kV) + row * kRow + piece * 4, p.in[kV] + at, inside);
  }
}

// A half of the warp has 8 tokens, the lanes in it four keys each.
struct Corner {
  int token, key;
};

template <class T>
__device__ __forceinline__ Vector<T, 4> raw(const Slot& slot, int input, int t, Corner c) {
  const float* row = slot.row(input, c.token + t) + (sizeof(T) == 4 ? place(c.key) : c.key / 2);
  return load_vector<T, 4>(reinterpret_cast<const T*>(row));
}

// log2 of the decay: -e^-0.5 / ln 2 times the sigmoid of w.
__device__ __forceinline__ float log2_decay(float w) {
  return -0.87503876f * reciprocal_fast(1.0f + exp2_fast(-1.44269504f * w));
}

// e^(g - m) of the lane's tokens and keys, and in factor[0] that of the token before. g is counted from the middle of
// the chunk, so each half knows its own. Tokens past n do not decay.
template <class T>
__device__ __forceinline__ void sum_decays(float (&factor)[9][4], const Slot& slot, int n, Corner c) {
#pragma unroll
  for (int i = 0; i < 4; i++) factor[0][i] = 0.0f;
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const Vector<T, 4> w = raw<T>(slot, kW, t, c);
    const bool inside = c.token + t < n;
#pragma unroll
    for (int i = 0; i < 4; i++)
      factor[t + 1][i] = factor[t][i] + (inside ? log2_decay(static_cast<float>(w.values[i])) : 0.0f);
  }
  float whole[4];
  const float first = 1.0f - 0.125f * static_cast<float>(c.token);  // 1 in the first half, 0 in the second: no branch
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float total = factor[8][i];
    whole[i] = exp2_fast(total);
#pragma unroll
    for (int t = 0; t < 9; t++) factor[t][i] = exp2_fast(factor[t][i] - first * total);
  }
  // after() lies behind before().
  float4_at(slot.before() + c.token / 8 * kHead + c.key) = make_float4(whole[0], whole[1], whole[2], whole[3]);
}

// Scales an input by factor(t, i), and makes it an operand.
template <class T, bool split, class Factor>
__device__ __forceinline__ void scale(const Slot& slot, int input, Corner c, Factor factor) {
  Vector<T, 4> x[8];
#pragma unroll
  for (int t = 0; t < 8; t++) x[t] = raw<T>(slot, input, t, c);
  if (sizeof(T) == 2) __syncwarp();  // what this lane writes, another one reads
#pragma unroll
  for (int t = 0; t < 8; t++) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = operand<split>(static_cast<float>(x[t].values[i]) * factor(t, i));
    float4_at(slot.row(input, c.token + t) + place(c.key)) = make_float4(y[0], y[1], y[2], y[3]);
  }
}

template <class T, bool split>
__device__ __forceinline__ void scale_inputs(const Slot& slot, int n, int lane) {
  const Corner c{lane / 16 * 8, lane % 16 * 4};
  float factor[9][4];
  sum_decays<T>(factor, slot, n, c);
  scale<T, split>(slot, kR, c, [&](int t, int i) { return factor[t + 1][i]; });
  scale<T, split>(slot, kA, c, [&](int t, int i) { return factor[t][i]; });
#pragma unroll
  for (int t = 1; t < 9; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) factor[t][i] = reciprocal_fast(factor[t][i]);
  }
  scale<T, split>(slot, kK, c, [&](int t, int i) { return factor[t + 1][i]; });
  scale<T, split>(slot, kB, c, [&](int t, int i) { return factor[t + 1][i]; });
  __syncwarp();
}

constexpr int kLowerRow = 20;  // of L transposed, for the banks

// Stores tokens by tokens, [half]: the columns 8 half to 8 half + 7. The triangle, with its diagonal or without.
template <bool split>
__device__ __forceinline__ void store_lower(float* small, const Sums (&x)[2], bool diagonal, int lane) {
  const int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = g + 8 * i, at = 8 * half + column;
      const float first = at < row || (at == row && diagonal) ? x[half][2 * i] : 0.0f;
      const float second = at + 1 < row || (at + 1 == row && diagonal) ? x[half][2 * i + 1] : 0.0f;
      *reinterpret_cast<float2*>(small + row * kSmallRow + at) =
          make_float2(operand<split>(first), operand<split>(second));
    }
  }
}

// a~ b~' transposed into `lower`, and a~ k~', r~ b~' and r~ k~': their triangles.
template <bool split>
__device__ __forceinline__ void between_tokens(const Slot& slot, float* lower, int lane) {
  const int g = lane / 4, q = lane % 4;
  Sums ab[2] = {}, ak[2] = {}, rb[2] = {}, rk[2] = {};
#pragma unroll 2
  for (int i = 0; i < 4; i++) {  // four keys of this lane: two steps of eight for the warp
    const auto keys = [&](int input, int half) {
      return float4_at(slot.row(input, g + 8 * half) + place(16 * q) + 4 * i);
    };
    const float4 a[2] = {keys(kA, 0), keys(kA, 1)}, r[2] = {keys(kR, 0), keys(kR, 1)};
    const float4 b[2] = {keys(kB, 0), keys(kB, 1)}, k[2] = {keys(kK, 0), keys(kK, 1)};
    const Left a_left[2] = {{a[0].x, a[1].x, a[0].y, a[1].y}, {a[0].z, a[1].z, a[0].w, a[1].w}};
    const Left r_left[2] = {{r[0].x, r[1].x, r[0].y, r[1].y}, {r[0].z, r[1].z, r[0].w, r[1].w}};
#pragma unroll
    for (int step = 0; step < 2; step++) {
      multiply<split, 8>([&](int j) -> TileProduct {
        const int half = j % 2;
        Sums& sums = j < 2 ? ab[half] : j < 4 ? ak[half] : j < 6 ? rb[half] : rk[half];
        const float4 x = j / 2 % 2 == 0 ? b[half] : k[half];
        return {sums, sums, j < 4 ? a_left[step] : r_left[step], {step ? x.z : x.x, step ? x.w : x.y}};
      });
    }
  }
  store_lower<split>(slot.seen(), rk, true, lane);
  store_lower<split>(slot.seen_removed(), rb, true, lane);
  store_lower<split>(slot.removed(), ak, false, lane);
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = g + i / 2 * 8, column = 8 * half + 2 * q + i % 2;
      lower[column * kLowerRow + row] = column < row ? ab[half][i] : 0.0f;
    }
  }
  __syncwarp();
}

// (I - L)^-1 for L transposed in `lower`, which lies where the result goes. A lane has a column, both halves the same.
template <bool split>
__device__ __forceinline__ void invert(const Slot& slot, const float* lower, int lane) {
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
    slot.inverse()[row * kSmallRow + column] = operand<split>(lane < 16 ? x[i] : x[i + 8]);
  }
  __syncwarp();
}

// T a~ in the place of a~, T tril(a~ k~', -1) in the place of the triangle.
template <bool split>
__device__ __forceinline__ void apply_inverse(const Slot& slot, int lane) {
  const int g = lane / 4, q = lane % 4;
  Sums small[2] = {}, wide[8] = {};
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const float2 top = load_tokens(slot.inverse(), g, step, q), bottom = load_tokens(slot.inverse(), g + 8, step, q);
    const Left t = {top.x, bottom.x, top.y, bottom.y};
    const int token = 8 * step + 2 * q;
    const float* keys = slot.removed() + token * kSmallRow + g;
    multiply<split, 2>([&](int half) -> TileProduct {
      return {small[half], small[half], t, {keys[8 * half], keys[8 * half + kSmallRow]}};
    });
    float first[8], second[8];
    load_columns(first, slot.row(kA, token), g);
    load_columns(second, slot.row(kA, token + 1), g);
    multiply<split, 8>([&](int j) -> TileProduct { return {wide[j], wide[j], t, {first[j], second[j]}}; });
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = g + 8 * i;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      *reinterpret_cast<float2*>(slot.removed() + row * kSmallRow + 8 * half + 2 * q) =
          make_float2(operand<split>(small[half][2 * i]), operand<split>(small[half][2 * i + 1]));
    }
#pragma unroll
    for (int key = 0; key < 16; key += 4) {
      const auto at = [&](int k) { return operand<split>(wide[tile_of(k)][2 * i + column_of(k)]); };
      float4_at(slot.row(kA, row) + place(16 * q) + key) = make_float4(at(key), at(key + 1), at(key + 2), at(key + 3));
    }
  }
  __syncwarp();
}

}  // namespace cog_rwkv

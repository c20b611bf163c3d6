// wkv7 in chunks by wgmma, the part that needs no state. With g the log-decay summed up to a token, from the start of
// the chunk, g' that before the token, and G that of the whole chunk:
//   r^ = r e^g, a^ = a e^g' and k^ = k e^(G - g), b^ = b e^(G - g), all of them no larger than the inputs, for the
//   state; k e^-g, b e^-g, up to 2^14 times as large, for what is between tokens: with r^, a^ that makes P, Q, A and W.
// The formulas stand in chunked.cuh, there measured from the middle.
#pragma once

#include "produce.cuh"
#include "tiles.cuh"

namespace cog_rwkv {

// Tensor cores cut off all but 11 bits of an operand. Made larger by this factor, 2^kToNearest, it is off by nothing in
// the mean, and what had 11 bits stays what it was: as good as rounding, and free where a factor is 2^x anyway.
constexpr float kToNearest = 0.00048828125f;

// The tokens 8 half to 8 half + 7 and, in its warp's 32 keys, 2 l and 2 l + 1: what a lane scales.
struct Piece {
  int half, part, l;
};

template <class T>
__device__ __forceinline__ void start_copies(const Wkv7<T, void>& p, const Tiles& tiles, int64_t token, int n,
                                             int64_t head, Team team) {
  const int thread = team.part * kWarp + team.lane, piece = thread % 8;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = thread / 8 + 8 * i;
    const bool inside = row < n;
    const int64_t at = ((token + (inside ? row : 0)) * p.heads + head) * kHead + 8 * piece;
#pragma unroll
    for (int input = 0; input < 6; input++) {
      copy16(&tiles.at<unsigned char>(Tiles::raw(input, row, piece)), p.in[input] + at, inside);
    }
  }
}

template <class T>
__device__ __forceinline__ Vector<T, 2> raw(const Tiles& tiles, int input, int t, Piece c) {
  return tiles.at<Vector<T, 2>>(Tiles::raw(input, 8 * c.half + t, 4 * c.part) + 4 * c.l);
}

// g of the lane's tokens and keys, in sums[0] that before its first token, and G. Tokens past n do not decay.
template <class T>
__device__ __forceinline__ void sum_decays(float (&sums)[9][2], float (&whole)[2], const Tiles& tiles, int n, Piece c) {
  sums[0][0] = sums[0][1] = 0.0f;
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const Vector<T, 2> w = raw<T>(tiles, kW, t, c);
    const float rate = 8 * c.half + t < n ? kLog2Decay : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) sums[t + 1][i] = sums[t][i] + rate * sigmoid_of(static_cast<float>(w.values[i]));
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float other = __shfl_xor_sync(0xffffffffu, sums[8][i], 16);
    whole[i] = sums[8][i] + other;
#pragma unroll
    for (int t = 0; t < 9; t++) sums[t][i] += c.half ? other : 0.0f;
  }
}

// Makes r^ and a^.
template <class T>
__device__ __forceinline__ void scale_readers(const Tiles& tiles, const float (&sums)[9][2], Piece c, Team team) {
  Vector<T, 2> r[8], a[8];
#pragma unroll
  for (int t = 0; t < 8; t++) r[t] = raw<T>(tiles, kR, t, c), a[t] = raw<T>(tiles, kA, t, c);
  team.sync();  // what this lane writes, another one reads
  // Terms of the first key, or in the upper half of the second: so that the two halves do not meet in a bank.
  const int to = Tiles::kRead + c.part * Tiles::kTile + c.half * Tiles::kEight +
                 ((2 * (c.l / 8) + c.l % 2 + 4 * c.half) * 16 + c.l % 8 / 2 * 4);
  float before[2];
#pragma unroll
  for (int i = 0; i < 2; i++) before[i] = exp2_fast(sums[0][i] + kToNearest);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    float x[2], y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      y[i] = static_cast<float>(a[t].values[i]) * before[i];
      before[i] = exp2_fast(sums[t + 1][i] + kToNearest);
      x[i] = static_cast<float>(r[t].values[i]) * before[i];
    }
    const int line = t * Tiles::kLineBytes, one = (to ^ t * 16) + line, other = (to ^ t * 16 ^ 64) + line;
    tiles.at<float>(one) = c.half ? y[1] : y[0], tiles.at<float>(other) = c.half ? y[0] : y[1];
    tiles.at<float>(one + Tiles::kReadR) = c.half ? x[1] : x[0];
    tiles.at<float>(other + Tiles::kReadR) = c.half ? x[0] : x[1];
  }
}

// Makes k^, b^, and the two for products between tokens.
template <class T>
__device__ __forceinline__ void scale_writers(const Tiles& tiles, const float (&sums)[9][2], const float (&whole)[2],
                                              Piece c, Team team) {
  Vector<T, 2> k[8], b[8];
#pragma unroll
  for (int t = 0; t < 8; t++) k[t] = raw<T>(tiles, kK, t, c), b[t] = raw<T>(tiles, kB, t, c);
  team.sync();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = 16 * i + c.l, place = (32 * c.part + term(column)) * 4;
    float x[8], y[8];
#pragma unroll
    for (int t = 0; t < 8; t++) {
      const float factor = exp2_fast(kToNearest - sums[t + 1][i]);
      x[t] = static_cast<float>(k[t].values[i]) * factor, y[t] = static_cast<float>(b[t].values[i]) * factor;
      tiles.at<float>(Tiles::key_row(kK, 8 * c.half + t) + place) = x[t];
      tiles.at<float>(Tiles::key_row(kB, 8 * c.half + t) + place) = y[t];
    }
    const float all = exp2_fast(whole[i]);
    if (c.half == 0) tiles.at<float>(Tiles::kDecay + (32 * c.part + column) * 4) = all;
    const int to = Tiles::kWrite + (32 * c.part + column) * Tiles::kLineBytes + ((2 * c.half) ^ (c.l % 8)) * 16;
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      tiles.at<float4>(to ^ odd * 16) = make_float4(x[odd] * all, x[odd + 2] * all, x[odd + 4] * all, x[odd + 6] * all);
      tiles.at<float4>(to ^ odd * 16 ^ 64) =
          make_float4(y[odd] * all, y[odd + 2] * all, y[odd + 4] * all, y[odd + 6] * all);
    }
  }
}

// Stores tokens by tokens, [half]: the columns 8 half to 8 half + 7, in lines from `to` on, from their piece `first`
// on. The triangle, with its diagonal or without.
__device__ __forceinline__ void store_triangle(const Tiles& tiles, int to, int first, const Sums (&x)[2], bool diagonal,
                                               int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = g + i / 2 * 8, odd = i % 2, column = 8 * half + 2 * q + odd;
      tiles.at<float>(to + row * Tiles::kLineBytes + ((first + 2 * half + odd) ^ g) * 16 + q * 4) =
          column < row || (column == row && diagonal) ? operand<false>(x[half][i]) : 0.0f;
    }
  }
}

// a^ b' transposed into `lower`, and a^ k', r^ b' and r^ k': their triangles. A part of the team has a^, one r^.
__device__ __forceinline__ void between_tokens(const Tiles& tiles, float* lower, Team team) {
  const int g = team.lane / 4, q = team.lane % 4;
  const bool reads = team.part == 1;
  const int left = Tiles::kRead + (reads ? Tiles::kReadR : 0) + g * Tiles::kLineBytes;
  Sums with_b[2] = {}, with_k[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {  // four terms of this lane: two steps of eight for the warp
    const int at = left + i / 2 * Tiles::kTile + ((2 * q + i % 2) ^ g) * 16;
    const auto keys = [&](int input, int half) {
      return tiles.at<const float4>(Tiles::key_row(input, g + 8 * half) + (i / 2 * 32 + 8 * q + i % 2 * 4) * 4);
    };
    const float4 x[2] = {tiles.at<const float4>(at), tiles.at<const float4>(at + Tiles::kEight)};
    const float4 b[2] = {keys(kB, 0), keys(kB, 1)}, k[2] = {keys(kK, 0), keys(kK, 1)};
    const Left x_left[2] = {{x[0].x, x[1].x, x[0].y, x[1].y}, {x[0].z, x[1].z, x[0].w, x[1].w}};
#pragma unroll
    for (int step = 0; step < 2; step++) {
      multiply<false, 4>([&](int j) -> TileProduct {
        const int half = j % 2;
        Sums& sums = j < 2 ? with_b[half] : with_k[half];
        const float4 y = j < 2 ? b[half] : k[half];
        return {sums, sums, x_left[step], {step ? y.z : y.x, step ? y.w : y.y}};
      });
    }
  }
  store_triangle(tiles, Tiles::kSmall + (reads ? Tiles::kSmallR : 0), 0, with_k, reads, team.lane);
  if (reads) {
    store_triangle(tiles, Tiles::kSmall + Tiles::kSmallR, Tiles::kQ / 16, with_b, true, team.lane);
  } else {
    store_lower_transposed(lower, with_b, team.lane);
  }
}

// T a^ in the place of a^, T tril(a^ k', -1) in the place of the triangle: half of the columns for a part of the team.
__device__ __forceinline__ void apply_inverse(const Tiles& tiles, Team team) {
  const int g = team.lane / 4, q = team.lane % 4;
  const int small = Tiles::kSmall, keys = Tiles::kRead + team.part * Tiles::kTile;
  Sums narrow = {}, wide[4] = {};
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const float* inverse = tiles.inverse();
    const float2 top = load_tokens(inverse, g, step, q), bottom = load_tokens(inverse, g + 8, step, q);
    const Left t = {top.x, bottom.x, top.y, bottom.y};
    float between[2];
    float4 a[2];
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int token = 2 * q + odd, line = (8 * step + token) * Tiles::kLineBytes;
      between[odd] = tiles.at<float>(small + line + ((2 * team.part + g / 4) ^ token) * 16 + g % 4 * 4);
      a[odd] = tiles.at<const float4>(keys + line + (g ^ token) * 16);
    }
    const float first[4] = {a[0].x, a[0].y, a[0].z, a[0].w}, second[4] = {a[1].x, a[1].y, a[1].z, a[1].w};
    multiply<false, 1>([&](int) -> TileProduct { return {narrow, narrow, t, {between[0], between[1]}}; });
    multiply<false, 4>([&](int j) -> TileProduct { return {wide[j], wide[j], t, {first[j], second[j]}}; });
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int line = (g + 8 * i) * Tiles::kLineBytes;
    tiles.at<float2>(small + line + ((2 * team.part + q / 2) ^ g) * 16 + q % 2 * 8) =
        make_float2(operand<false>(narrow[2 * i]), operand<false>(narrow[2 * i + 1]));
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const auto at = [&](int j) { return operand<false>(wide[j][2 * i + odd]); };
      tiles.at<float4>(keys + line + ((2 * q + odd) ^ g) * 16) = make_float4(at(0), at(1), at(2), at(3));
    }
  }
}

// All that a chunk of n tokens gives, where its inputs are.
template <class T>
__device__ __forceinline__ void make_chunk(const Tiles& tiles, int n, Team team) {
  const Piece c{team.lane / 16, team.part, team.lane % 16};
  float sums[9][2], whole[2];
  sum_decays<T>(sums, whole, tiles, n, c);
  scale_readers<T>(tiles, sums, c, team);
  scale_writers<T>(tiles, sums, whole, c, team);
  team.sync();
  float* lower = tiles.inverse();
  between_tokens(tiles, lower, team);
  if (team.part == 0) invert<false>(tiles.inverse(), lower, team.lane);
  team.sync();
  apply_inverse(tiles, team);
}

}  // namespace cog_rwkv

// The gradient of wkv7 on CUDA, its second part: every chunk by itself, from what states.cuh left of it. With the names
// there and in chunked.cuh,
//   dr~ = dY S_e + tril(dY V') k~ + tril(dY U') b~           da~ = Z S_e + tril(Z V', -1) k~ + tril(Z U', -1) b~
//   dk~ = V dS_e + tril(dY V')' r~ + tril(Z V', -1)' a~      db~ = U dS_e + tril(dY U')' r~ + tril(Z U', -1)' a~
//   dV = k~ dS_e' + tril(r~ k~')' dY + tril(a~ k~', -1)' Z
// The log-decay of a token has, per key, the sum over it and the later tokens of dr~ r~ - dk~ k~ - db~ b~, over the
// later ones of da~ a~, and that of the whole chunk: over the values of dS_e S_e and over the tokens of k~ (V dS_e) +
// b~ (U dS_e).
//
// A warp has 16 keys, and of dV 16 values. States come from memory right into registers, as operands: columns g of two
// products are keys 2 g and 2 g + 1 of the 16, so that a lane ends with four keys side by side.
#pragma once

#include "../csrc/reduce.cuh"
#include "gradient_chunk.cuh"

namespace cog_rwkv {

// The gradients of 16 tokens and the warp's keys: [tile], in the order of Columns; of dV the transpose: values 2 g and
// 2 g + 1 are rows g and g + 8, [tile]: tokens 8 tile to 8 tile + 7.
struct KeySums {
  Sums r[2] = {}, k[2] = {}, v[2] = {}, a[2] = {}, b[2] = {};
};

// x += left * right(tile).
template <bool split, bool exact, class F>
__device__ __forceinline__ void add_tiles(Sums (&x)[2], const Left& left, F right) {
  Right y[2];
  right(y[0], 0), right(y[1], 1);
  multiply<split, 2, exact>(
      [&](int tile) -> TileProduct { return {x[tile], x[tile], left, {y[tile][0], y[tile][1]}}; });
}

// Columns 8 tile to 8 tile + 7: the lower triangle.
template <bool split>
__device__ __forceinline__ void store_half_triangle(float* to, const Sums& x, int tile, bool diagonal, int g, int q) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 8 * tile + 2 * q + i % 2;
    to[row * kTriangleRow + column] = column < row || (column == row && diagonal) ? operand<split>(x[i]) : 0.0f;
  }
}

// Products with states, and over values: each warp has one of the four between tokens.
template <class T>
__device__ __forceinline__ void add_states(KeySums& d, GradientShared& s, const ChunkGradients<T>& p,
                                           const Columns& state, const Columns& d_state, const Place<T>& c) {
  constexpr bool split = kSplitGradients<T>, exact = sizeof(T) == 2;
  const float *u = p.removed[0] + c.chunk * kChunk * kHead, *z = p.removed[1] + c.chunk * kChunk * kHead;
  const auto row = [&](int token) { return c.row(token); };
  const auto found_row = [](int token) { return token * static_cast<int>(kHead); };
  Sums between[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Left d_y[2], v[2], from_u[2], from_z[2];
    load_tokens_left(d_y, p.d_y + c.first, i, c.g, c.q, row);
    load_tokens_left(v, p.in[kV] + c.first, i, c.g, c.q, row);
    load_tokens_left(from_u, u, i, c.g, c.q, found_row);
    load_tokens_left(from_z, z, i, c.g, c.q, found_row);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const auto of_state = [&](Right& to, int tile) { state.right(to, i, h, tile); };
      const auto of_gradient = [&](Right& to, int tile) { d_state.right(to, i, h, tile); };
      add_tiles<split, exact>(d.r, d_y[h], of_state);
      add_tiles<split, false>(d.a, from_z[h], of_state);
      add_tiles<split, exact>(d.k, v[h], of_gradient);
      add_tiles<split, false>(d.b, from_u[h], of_gradient);
      Left one, other;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        one[e] = c.warp < 2 ? d_y[h][e] : from_z[h][e];
        other[e] = c.warp % 2 == 0 ? v[h][e] : from_u[h][e];
      }
      add_tiles<split, false>(between, one, [&](Right& to, int tile) { to[0] = other[tile], to[1] = other[tile + 2]; });
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    store_half_triangle<split>(s.triangles[c.warp], between[tile], tile, c.warp < 2, c.g, c.q);
  }
}

// Products over keys: dS_e k~', and of each of r~ k~' and a~ k~' half for a warp.
template <class T>
__device__ __forceinline__ void add_keys(KeySums& d, GradientShared& s, const ChunkGradients<T>& p, const Place<T>& c) {
  constexpr bool split = kSplitGradients<T>;
  const float* gradient = p.states[1] + (c.chunk * kHead + 2 * c.q) * kHead + 16 * c.warp + 2 * c.g;
  const float* const reader = (c.warp < 2 ? s.r : s.a) + c.g * kWideRow + 2 * c.q;
  const float* const writer = s.k + c.g * kWideRow + 2 * c.q;
  const int half = c.warp % 2;
  Sums between = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {  // keys 8 i + 2 q and the next
    const float2 one = float2_at(gradient + 8 * i * kHead), next = float2_at(gradient + (8 * i + 1) * kHead);
    const float2 k[2] = {float2_at(writer + 8 * i), float2_at(writer + 8 * kWideRow + 8 * i)};
    const float2 x0 = float2_at(reader + 8 * i), x1 = float2_at(reader + 8 * kWideRow + 8 * i);
    const float2 own = half ? k[1] : k[0];
    add_tiles<split, false>(d.v, {one.x, one.y, next.x, next.y},
                            [&](Right& to, int tile) { to[0] = k[tile].x, to[1] = k[tile].y; });
    const Left x = {x0.x, x1.x, x0.y, x1.y};
    multiply<split, 1>([&](int) -> TileProduct { return {between, between, x, {own.x, own.y}}; });
  }
  store_half_triangle<split>(s.triangles[c.warp < 2 ? kRK : kAK], between, half, c.warp < 2, c.g, c.q);
}

// A triangle as left operand, or its transpose: terms are tokens 8 step + q and 8 step + q + 4.
template <bool transposed>
__device__ __forceinline__ void load_triangle(Left& to, const float* x, int step, int g, int q) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g + i % 2 * 8, term = 8 * step + q + i / 2 * 4;
    to[i] = x[transposed ? term * kTriangleRow + row : row * kTriangleRow + term];
  }
}

// x += triangle * rows(token), pairs of neighbouring columns.
template <bool split, bool transposed, class F>
__device__ __forceinline__ void add_triangle(Sums (&x)[2], const float* triangle, int step, int g, int q, F rows) {
  Left left;
  load_triangle<transposed>(left, triangle, step, g, q);
  const float2 one = rows(8 * step + q), next = rows(8 * step + q + 4);
  add_tiles<split, false>(x, left,
                          [&](Right& to, int tile) { to[0] = tile ? one.y : one.x, to[1] = tile ? next.y : next.x; });
}

// d_v += rows' triangle, of the values `rows` gives for a token.
template <bool split, bool exact, class F>
__device__ __forceinline__ void add_triangle_values(Sums (&d_v)[2], const float* triangle, int step, int g, int q,
                                                    F rows) {
  const int token = 8 * step + q;
  const float2 one = rows(token), next = rows(token + 4);
  add_tiles<split, exact>(d_v, {one.x, one.y, next.x, next.y}, [&](Right& to, int tile) {
    const float* from = triangle + token * kTriangleRow + 8 * tile + g;
    to[0] = from[0], to[1] = from[4 * kTriangleRow];
  });
}

// What tokens of the chunk have of each other.
template <class T>
__device__ __forceinline__ void add_triangles(KeySums& d, const GradientShared& s, const ChunkGradients<T>& p,
                                              const Place<T>& c) {
  constexpr bool split = kSplitGradients<T>, exact = sizeof(T) == 2;
  const int corner = 16 * c.warp + 2 * c.g, g = c.g, q = c.q;
  const auto rows_of = [&](const float* x) { return [=](int t) { return float2_at(x + t * kWideRow + corner); }; };
  const auto r = rows_of(s.r), k = rows_of(s.k), a = rows_of(s.a), b = rows_of(s.b);
  const T* const d_y_rows = p.d_y + c.first + corner;
  const float* const z_rows = p.removed[1] + c.chunk * kChunk * kHead + corner;
  const auto d_y = [&](int t) { return load_two(d_y_rows + c.row(t)); };
  const auto z = [&](int t) { return float2_at(z_rows + t * kHead); };
#pragma unroll
  for (int step = 0; step < 2; step++) {
    add_triangle<split, false>(d.r, s.triangles[kYV], step, g, q, k);
    add_triangle<split, false>(d.a, s.triangles[kZV], step, g, q, k);
    add_triangle<split, true>(d.k, s.triangles[kYV], step, g, q, r);
    add_triangle<split, true>(d.b, s.triangles[kYU], step, g, q, r);
    add_triangle_values<split, exact>(d.v, s.triangles[kRK], step, g, q, d_y);
    add_triangle<split, false>(d.r, s.triangles[kYU], step, g, q, b);
    add_triangle<split, false>(d.a, s.triangles[kZU], step, g, q, b);
    add_triangle<split, true>(d.k, s.triangles[kZV], step, g, q, a);
    add_triangle<split, true>(d.b, s.triangles[kZU], step, g, q, a);
    add_triangle_values<split, false>(d.v, s.triangles[kAK], step, g, q, z);
  }
}

// Keys 4 q to 4 q + 3 of the warp, of row g + 8 half.
__device__ __forceinline__ float element(const Sums (&x)[2], int half, int i) { return x[i % 2][2 * half + i / 2]; }

__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
  const float4 x = float4_at(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// The gradient of the chunk's whole log-decay for the lane's four keys, given `d` of states alone.
template <class T>
__device__ __forceinline__ void sum_whole(float (&whole)[4], const KeySums& d, const GradientShared& s,
                                          const Columns& state, const Columns& d_state, const Place<T>& c) {
  float2 sum = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum.x += dot(state.at[0][i], d_state.at[0][i]), sum.y += dot(state.at[1][i], d_state.at[1][i]);
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    sum.x += __shfl_xor_sync(kAllLanes, sum.x, lanes), sum.y += __shfl_xor_sync(kAllLanes, sum.y, lanes);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) whole[i] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float k[4], b[4];
    const int at = (c.g + 8 * half) * kWideRow + 16 * c.warp + 4 * c.q;
    load_four(k, s.k + at), load_four(b, s.b + at);
#pragma unroll
    for (int i = 0; i < 4; i++) whole[i] += element(d.k, half, i) * k[i] + element(d.b, half, i) * b[i];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int lanes = 4; lanes < kWarp; lanes *= 2) whole[i] += __shfl_xor_sync(kAllLanes, whole[i], lanes);
    whole[i] += __shfl_sync(kAllLanes, i % 2 ? sum.y : sum.x, (2 * c.q + i / 2) * 4);
  }
}

// The compiler takes apart what is stored as an array of 16-bit numbers.
template <class T, int count>
__device__ __forceinline__ void store_floats(T* to, const float (&x)[count]) {
  constexpr int bytes = count * sizeof(T);
  using Bits = std::conditional_t<bytes == 16, uint4, std::conditional_t<bytes == 8, uint2, uint32_t>>;
  Vector<T, count> rounded;
  Bits bits;
#pragma unroll
  for (int i = 0; i < count; i++) rounded.values[i] = static_cast<T>(x[i]);
  static_assert(sizeof(Bits) == bytes);
  memcpy(&bits, &rounded, bytes);
  *reinterpret_cast<Bits*>(to) = bits;
}

// A lane has values 2 g and 2 g + 1 of tokens 2 q and 2 q + 1 of each half.
template <class T>
__device__ __forceinline__ void write_value_gradient(const KeySums& d, const ChunkGradients<T>& p, const Place<T>& c) {
  T* const to = p.out[kV] + c.first + 16 * c.warp + 2 * c.g;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 8 * (i / 2) + 2 * c.q + i % 2;
    if (token < c.n) store_floats<T, 2>(to + token * c.stride, {d.v[i / 2][i % 2], d.v[i / 2][2 + i % 2]});
  }
}

// Writes the gradients of r, k, a and b. Leaves what each of the lane's tokens [half] gives to the log-decays up to its
// own, `here`, and up to the one before, `before`.
template <class T>
__device__ __forceinline__ void write_gradients(float (&here)[2][4], float (&before)[2][4], const KeySums& d,
                                                const GradientShared& s, const ChunkGradients<T>& p,
                                                const Place<T>& c) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = c.g + 8 * half, key = 16 * c.warp + 4 * c.q, at = row * kWideRow + key;
    float r[4], k[4], a[4], b[4], factor[4], factor_before[4];
    load_four(r, s.r + at), load_four(k, s.k + at), load_four(a, s.a + at), load_four(b, s.b + at);
    load_four(factor_before, s.factor + at), load_four(factor, s.factor + at + kWideRow);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float d_r = element(d.r, half, i), d_k = element(d.k, half, i);
      const float d_a = element(d.a, half, i), d_b = element(d.b, half, i), back = reciprocal_fast(factor[i]);
      here[half][i] = d_r * r[i] - d_k * k[i] - d_b * b[i];
      before[half][i] = d_a * a[i];
      r[i] = d_r * factor[i], a[i] = d_a * factor_before[i], k[i] = d_k * back, b[i] = d_b * back;
    }
    if (row >= c.n) continue;
    const int64_t to = c.first + row * c.stride + key;
    store_floats(p.out[kR] + to, r), store_floats(p.out[kK] + to, k);
    store_floats(p.out[kA] + to, a), store_floats(p.out[kB] + to, b);
  }
}

// The gradient of w. A lane has tokens g and g + 8; those behind are in the lanes of larger g.
template <class T>
__device__ __forceinline__ void write_decay_gradient(const float (&here)[2][4], const float (&before)[2][4],
                                                     const float (&whole)[4], const ChunkGradients<T>& p,
                                                     const Place<T>& c) {
  float behind[2][4], sums[2][4];  // over the later tokens of the same half; over the whole half
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int half = i / 4, j = i % 4;
    const float own = here[half][j] + before[half][j];
    float sum = own;
#pragma unroll
    for (int tokens = 1; tokens < 8; tokens *= 2) {
      const float more = __shfl_down_sync(kAllLanes, sum, 4 * tokens);
      sum += c.g + tokens < 8 ? more : 0.0f;
    }
    behind[half][j] = sum - own;
    sums[half][j] = __shfl_sync(kAllLanes, sum, c.q);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = c.g + 8 * half;
    if (row >= c.n) continue;
    const int64_t at = c.first + row * c.stride + 16 * c.warp + 4 * c.q;
    const Vector<T, 4> w = load_vector<T, 4>(p.in[kW] + at);
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float rate = sigmoid_of(static_cast<float>(w.values[i]));
      const float sum = whole[i] + (half ? 0.0f : sums[1][i]) + behind[half][i] + here[half][i];
      d[i] = -0.60653066f * sum * rate * (1.0f - rate);
    }
    store_floats(p.out[kW] + at, d);
  }
}

// A block a sequence, head and chunk.
template <class T>
__global__ void __launch_bounds__(kGradientThreads, kSplitGradients<T> ? 2 : 3)
    wkv7_gradients_kernel(const ChunkGradients<T> p) {
  __shared__ __align__(16) GradientShared s;
  const Place<T> c(p);
  Columns state, d_state;
  state.load(p.states[0], c);
  d_state.load(p.states[1], c);
  scale_chunk(s, p, c);
  __syncthreads();
  KeySums d;
  float whole[4], here[2][4], before[2][4];
  add_states(d, s, p, state, d_state, c);
  sum_whole(whole, d, s, state, d_state, c);
  add_keys(d, s, p, c);
  __syncthreads();
  add_triangles(d, s, p, c);
  write_value_gradient(d, p, c);
  write_gradients(here, before, d, s, p, c);
  write_decay_gradient(here, before, whole, p, c);
}

}  // namespace cog_rwkv

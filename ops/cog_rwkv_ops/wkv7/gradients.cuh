// The gradient of wkv7 on CUDA, its second part: every chunk by itself, from what states.cuh left of it. With the names
// there and in chunked.cuh,
//   dr~ = dY S_e + tril(dY V') k~ + tril(dY U') b~           da~ = Z S_e + tril(Z V', -1) k~ + tril(Z U', -1) b~
//   dk~ = V dS_e + tril(dY V')' r~ + tril(Z V', -1)' a~      db~ = U dS_e + tril(dY U')' r~ + tril(Z U', -1)' a~
//   dV = k~ dS_e' + tril(r~ k~')' dY + tril(a~ k~', -1)' Z
// The log-decay of a token has, per key, the sum over it and the later tokens of dr~ r~ - dk~ k~ - db~ b~, over the later
// ones of da~ a~, and that of the whole chunk: over the values of dS_e S_e and over the tokens of k~ (V dS_e) + b~ (U dS_e).
//
// A warp has 16 keys, and of dV 16 values. States come from memory right into registers, as operands: key 2 g of its 16
// is column g of one product, key 2 g + 1 of another, so that a lane ends with four keys side by side.
#pragma once

#include "../csrc/reduce.cuh"
#include "produce.cuh"

namespace cog_rwkv {

constexpr int kGradientWarps = 4, kGradientThreads = kGradientWarps * kWarp;
constexpr int kWideRow = 72, kTriangleRow = 24;  // floats from a row of 64, of 16, to the next

template <class T>
struct ChunkGradients {
  const T *in[6], *d_y;      // r, w, k, v, a, b, each [batch, tokens, heads, 64]
  const float* states[2];    // S_e, dS_e
  const float* removed[2];   // U, Z
  T* out[6];                 // gradients of `in`
  int64_t tokens, heads, chunks;
};

// What is between tokens, by which of r, a (dY, Z) and which of k, b (V, U) it is.
enum Triangle { kYV, kYU, kZV, kZU, kRK, kAK, kTriangles };

struct GradientShared {
  float r[kChunk * kWideRow], k[kChunk * kWideRow], a[kChunk * kWideRow], b[kChunk * kWideRow];  // scaled
  float factor[(kChunk + 1) * kWideRow];  // e^(g - m); row t + 1 is token t
  float triangles[kTriangles][kChunk * kTriangleRow];
};

// Where a chunk of n tokens lies, and which lane this is.
template <class T>
struct Place {
  int64_t first, stride, chunk;  // of the inputs, from a token to the next; of all chunks
  int n, warp, lane, g, q;

  __device__ __forceinline__ explicit Place(const ChunkGradients<T>& p) {
    chunk = blockIdx.x;
    const int64_t block = chunk / p.chunks, t = chunk % p.chunks * kChunk;
    n = static_cast<int>(min(p.tokens - t, int64_t{kChunk}));
    first = ((block / p.heads * p.tokens + t) * p.heads + block % p.heads) * kHead;
    stride = p.heads * kHead;
    warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, q = lane % 4;
  }
};

// A state as right operands for the keys of the warp: [4 i + x] has value 16 i + 4 q + x, keys 2 g and 2 g + 1.
struct Columns {
  float2 at[16];

  template <class T>
  __device__ __forceinline__ void load(const float* state, const Place<T>& c) {
    const float* from = state + c.chunk * kHead * kHead + 4 * c.q * kHead + 16 * c.warp + 2 * c.g;
#pragma unroll
    for (int i = 0; i < 16; i++) at[i] = float2_at(from + (i / 4 * 16 + i % 4) * kHead);
  }
  // For values 16 i + 4 q + 2 h and the next.
  __device__ __forceinline__ void right(Right& to, int i, int h, int tile) const {
    const float2 one = at[4 * i + 2 * h], next = at[4 * i + 2 * h + 1];
    to[0] = tile ? one.y : one.x, to[1] = tile ? next.y : next.x;
  }
};

// 16 tokens of which `n` are there, values 16 i to 16 i + 15 as two left operands in the order of Columns.
template <class U, class T>
__device__ __forceinline__ void load_tokens_left(Left (&to)[2], const U* from, int64_t stride, int n, int i,
                                                 const Place<T>& c) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = c.g + 8 * half;
    Vector<U, 4> x{};
    if (row < n) x = load_vector<U, 4>(from + row * stride + 16 * i + 4 * c.q);
#pragma unroll
    for (int e = 0; e < 4; e++) to[e / 2][half + e % 2 * 2] = static_cast<float>(x.values[e]);
  }
}

// Factors and scaled inputs: a lane has 8 tokens of a key.
template <class T>
__device__ __forceinline__ void scale_chunk(GradientShared& s, const ChunkGradients<T>& p, const Place<T>& c) {
  const int key = 16 * c.warp + c.lane % 16, half = c.lane / 16, token = 8 * half;
  const int64_t at = c.first + token * c.stride + key;
  const auto load = [&](int input, int t) {
    return token + t < c.n ? static_cast<float>(p.in[input][at + t * c.stride]) : 0.0f;
  };
  float factor[9];
  factor[0] = 0.0f;
#pragma unroll
  for (int t = 0; t < 8; t++) factor[t + 1] = factor[t] + (token + t < c.n ? log2_decay(load(kW, t)) : 0.0f);
  const float middle = half ? 0.0f : factor[8];
#pragma unroll
  for (int t = 0; t < 9; t++) factor[t] = exp2_fast(factor[t] - middle);
  if (half == 0) s.factor[key] = factor[0];
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const int to = (token + t) * kWideRow + key;
    const float back = reciprocal_fast(factor[t + 1]);
    s.factor[to + kWideRow] = factor[t + 1];
    s.r[to] = load(kR, t) * factor[t + 1], s.a[to] = load(kA, t) * factor[t];
    s.k[to] = load(kK, t) * back, s.b[to] = load(kB, t) * back;
  }
}

// The gradients of 16 tokens and the warp's keys, or values: [tile], in the order of Columns.
struct KeySums {
  Sums r[2] = {}, k[2] = {}, v[2] = {}, a[2] = {}, b[2] = {};
};

// x += left * right(tile).
template <bool exact, class F>
__device__ __forceinline__ void add_tiles(Sums (&x)[2], const Left& left, F right) {
  Right y[2];
  right(y[0], 0), right(y[1], 1);
  multiply<true, 2, exact>([&](int tile) -> TileProduct { return {x[tile], x[tile], left, {y[tile][0], y[tile][1]}}; });
}

// Columns 8 tile to 8 tile + 7: the lower triangle.
__device__ __forceinline__ void store_half_triangle(float* to, const Sums& x, int tile, bool diagonal, int g, int q) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 8 * tile + 2 * q + i % 2;
    to[row * kTriangleRow + column] = column < row || (column == row && diagonal) ? x[i] : 0.0f;
  }
}

// Products with states, and over values: each warp has one of the four between tokens.
template <class T>
__device__ __forceinline__ void add_states(KeySums& d, GradientShared& s, const ChunkGradients<T>& p,
                                           const Columns& state, const Columns& d_state, const Place<T>& c) {
  constexpr bool exact = sizeof(T) == 2;
  const float *u = p.removed[0] + c.chunk * kChunk * kHead, *z = p.removed[1] + c.chunk * kChunk * kHead;
  Sums between[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Left d_y[2], v[2], from_u[2], from_z[2];
    load_tokens_left(d_y, p.d_y + c.first, c.stride, c.n, i, c);
    load_tokens_left(v, p.in[kV] + c.first, c.stride, c.n, i, c);
    load_tokens_left(from_u, u, kHead, kChunk, i, c);
    load_tokens_left(from_z, z, kHead, kChunk, i, c);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const auto of_state = [&](Right& to, int tile) { state.right(to, i, h, tile); };
      const auto of_gradient = [&](Right& to, int tile) { d_state.right(to, i, h, tile); };
      add_tiles<exact>(d.r, d_y[h], of_state);
      add_tiles<false>(d.a, from_z[h], of_state);
      add_tiles<exact>(d.k, v[h], of_gradient);
      add_tiles<false>(d.b, from_u[h], of_gradient);
      Left one, other;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        one[e] = c.warp < 2 ? d_y[h][e] : from_z[h][e];
        other[e] = c.warp % 2 == 0 ? v[h][e] : from_u[h][e];
      }
      add_tiles<false>(between, one, [&](Right& to, int tile) { to[0] = other[tile], to[1] = other[tile + 2]; });
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    store_half_triangle(s.triangles[c.warp], between[tile], tile, c.warp < 2, c.g, c.q);
  }
}

// Products over keys: k~ dS_e', and of each of r~ k~' and a~ k~' half for a warp.
template <class T>
__device__ __forceinline__ void add_keys(KeySums& d, GradientShared& s, const ChunkGradients<T>& p, const Place<T>& c) {
  const float* gradient = p.states[1] + (c.chunk * kHead + 16 * c.warp + 2 * c.g) * kHead + 2 * c.q;
  const float* const reader = (c.warp < 2 ? s.r : s.a) + c.g * kWideRow + 2 * c.q;
  const float* const writer = s.k + c.g * kWideRow + 2 * c.q;
  const int half = c.warp % 2;
  Sums between = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {  // keys 8 i + 2 q and the next
    const float2 k0 = float2_at(writer + 8 * i), k1 = float2_at(writer + 8 * kWideRow + 8 * i);
    const float2 x0 = float2_at(reader + 8 * i), x1 = float2_at(reader + 8 * kWideRow + 8 * i);
    const float2 other = half ? k1 : k0;
    const Left k = {k0.x, k1.x, k0.y, k1.y}, x = {x0.x, x1.x, x0.y, x1.y};
    add_tiles<false>(d.v, k, [&](Right& to, int tile) {
      const float2 y = float2_at(gradient + tile * kHead + 8 * i);
      to[0] = y.x, to[1] = y.y;
    });
    multiply<true, 1>([&](int) -> TileProduct { return {between, between, x, {other.x, other.y}}; });
  }
  store_half_triangle(s.triangles[c.warp < 2 ? kRK : kAK], between, half, c.warp < 2, c.g, c.q);
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
template <bool transposed, class F>
__device__ __forceinline__ void add_triangle(Sums (&x)[2], const float* triangle, int step, int g, int q, F rows) {
  Left left;
  load_triangle<transposed>(left, triangle, step, g, q);
  const float2 one = rows(8 * step + q), next = rows(8 * step + q + 4);
  add_tiles<false>(x, left, [&](Right& to, int tile) {
    to[0] = tile ? one.y : one.x, to[1] = tile ? next.y : next.x;
  });
}

// What tokens of the chunk have of each other.
template <class T>
__device__ __forceinline__ void add_triangles(KeySums& d, const GradientShared& s, const ChunkGradients<T>& p,
                                              const Place<T>& c) {
  const int corner = 16 * c.warp + 2 * c.g, g = c.g, q = c.q;
  const auto rows_of = [&](const float* x) { return [=](int t) { return float2_at(x + t * kWideRow + corner); }; };
  const auto r = rows_of(s.r), k = rows_of(s.k), a = rows_of(s.a), b = rows_of(s.b);
  const auto d_y = [&](int t) {
    Vector<T, 2> x{};
    if (t < c.n) x = load_vector<T, 2>(p.d_y + c.first + t * c.stride + corner);
    return make_float2(static_cast<float>(x.values[0]), static_cast<float>(x.values[1]));
  };
  const auto z = [&](int t) { return float2_at(p.removed[1] + (c.chunk * kChunk + t) * kHead + corner); };
#pragma unroll
  for (int step = 0; step < 2; step++) {
    add_triangle<false>(d.r, s.triangles[kYV], step, g, q, k);
    add_triangle<false>(d.a, s.triangles[kZV], step, g, q, k);
    add_triangle<true>(d.k, s.triangles[kYV], step, g, q, r);
    add_triangle<true>(d.b, s.triangles[kYU], step, g, q, r);
    add_triangle<true>(d.v, s.triangles[kRK], step, g, q, d_y);
    add_triangle<false>(d.r, s.triangles[kYU], step, g, q, b);
    add_triangle<false>(d.a, s.triangles[kZU], step, g, q, b);
    add_triangle<true>(d.k, s.triangles[kZV], step, g, q, a);
    add_triangle<true>(d.b, s.triangles[kZU], step, g, q, a);
    add_triangle<true>(d.v, s.triangles[kAK], step, g, q, z);
  }
}

// Keys 4 q to 4 q + 3 of the warp, of row g + 8 half.
__device__ __forceinline__ float element(const Sums (&x)[2], int half, int i) { return x[i % 2][2 * half + i / 2]; }

__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
  const float4 x = float4_at(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// The gradient of the chunk's whole log-decay for the lane's four keys, given `d` of states alone.
template <class T>
__device__ __forceinline__ void sum_whole(float (&whole)[4], const KeySums& d, const GradientShared& s,
                                          const Columns& state, const Columns& d_state, const Place<T>& c) {
  float2 sum = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 16; i++) sum.x += state.at[i].x * d_state.at[i].x, sum.y += state.at[i].y * d_state.at[i].y;
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

template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&x)[4]) {
  store_vector<T, 4>(to, {static_cast<T>(x[0]), static_cast<T>(x[1]), static_cast<T>(x[2]), static_cast<T>(x[3])});
}

// Writes all gradients but that of w. Leaves what each of the lane's tokens [half] gives to the log-decays up to its own
// (`here`) and up to the one before (`before`).
template <class T>
__device__ __forceinline__ void write_gradients(float (&here)[2][4], float (&before)[2][4], const KeySums& d,
                                                const GradientShared& s, const ChunkGradients<T>& p,
                                                const Place<T>& c) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = c.g + 8 * half, key = 16 * c.warp + 4 * c.q, at = row * kWideRow + key;
    float r[4], k[4], a[4], b[4], v[4], factor[4], factor_before[4];
    load_four(r, s.r + at), load_four(k, s.k + at), load_four(a, s.a + at), load_four(b, s.b + at);
    load_four(factor_before, s.factor + at), load_four(factor, s.factor + at + kWideRow);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float d_r = element(d.r, half, i), d_k = element(d.k, half, i);
      const float d_a = element(d.a, half, i), d_b = element(d.b, half, i), back = reciprocal_fast(factor[i]);
      here[half][i] = d_r * r[i] - d_k * k[i] - d_b * b[i];
      before[half][i] = d_a * a[i];
      r[i] = d_r * factor[i], a[i] = d_a * factor_before[i], k[i] = d_k * back, b[i] = d_b * back;
      v[i] = element(d.v, half, i);
    }
    if (row >= c.n) continue;
    const int64_t to = c.first + row * c.stride + key;
    store_four(p.out[kR] + to, r), store_four(p.out[kK] + to, k), store_four(p.out[kV] + to, v);
    store_four(p.out[kA] + to, a), store_four(p.out[kB] + to, b);
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
    store_four(p.out[kW] + at, d);
  }
}

// A block a sequence, head and chunk.
template <class T>
__global__ void __launch_bounds__(kGradientThreads, 3) wkv7_gradients_kernel(const ChunkGradients<T> p) {
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
  write_gradients(here, before, d, s, p, c);
  write_decay_gradient(here, before, whole, p, c);
}

}  // namespace cog_rwkv

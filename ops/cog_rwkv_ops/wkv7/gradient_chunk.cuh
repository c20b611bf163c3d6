// What gradients.cuh begins with: a chunk's place in memory, its states as operands, and its inputs in shared memory,
// scaled by their decays.
#pragma once

#include "states.cuh"

namespace cog_rwkv {

constexpr int kGradientWarps = 4, kGradientThreads = kGradientWarps * kWarp;
constexpr int kWideRow = 72, kTriangleRow = 24;  // floats from a row of 64, of 16, to the next

template <class T>
struct ChunkGradients {
  const T *in[6], *d_y;     // r, w, k, v, a, b, each [batch, tokens, heads, 64]
  const float* states[2];   // S_e, dS_e, transposed
  const float* removed[2];  // U, Z
  T* out[6];                // gradients of `in`
  int64_t tokens;
  uint32_t heads, chunks;
};

// What is between tokens, by which of r, a (dY, Z) and which of k, b (V, U) it is.
enum Triangle { kYV, kYU, kZV, kZU, kRK, kAK, kTriangles };

struct GradientShared {
  float r[kChunk * kWideRow], k[kChunk * kWideRow], a[kChunk * kWideRow], b[kChunk * kWideRow];  // scaled
  float factor[(kChunk + 1) * kWideRow];  // e^(g - m); row t + 1 is token t
  float triangles[kTriangles][kChunk * kTriangleRow];
  float2 decays[kGradientWarps][kWarp];  // log2, of four tokens
};

// Where a chunk of n tokens lies, and which lane this is.
template <class T>
struct Place {
  int64_t first, chunk;  // of the inputs; of all chunks
  uint32_t stride;       // from a token to the next
  int n, warp, lane, g, q;

  __device__ __forceinline__ explicit Place(const ChunkGradients<T>& p) {
    chunk = blockIdx.x;
    const uint32_t block = blockIdx.x / p.chunks, t = blockIdx.x % p.chunks * kChunk;
    n = static_cast<int>(min(p.tokens - t, int64_t{kChunk}));
    first = ((block / p.heads * p.tokens + t) * p.heads + block % p.heads) * kHead;
    stride = p.heads * static_cast<uint32_t>(kHead);
    warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, q = lane % 4;
  }
  // The place of a token from `first`. Behind the last one that is the last: what is 0 there is scaled r, k, a and b.
  __device__ __forceinline__ uint32_t row(int token) const { return min(token, n - 1) * stride; }
};

// A state as right operands for the keys of the warp: [tile][i] has key 2 g + tile, values 16 i + 4 q and three more.
struct Columns {
  float4 at[2][4];

  template <class T>
  __device__ __forceinline__ void load(const float* state, const Place<T>& c) {
    const float* from = state + (c.chunk * kHead + 16 * c.warp + 2 * c.g) * kHead + 4 * c.q;
#pragma unroll
    for (int i = 0; i < 8; i++) at[i / 4][i % 4] = float4_at(from + i / 4 * kHead + i % 4 * 16);
  }
  // For values 16 i + 4 q + 2 h and the next.
  __device__ __forceinline__ void right(Right& to, int i, int h, int tile) const {
    const float4 x = at[tile][i];
    to[0] = h ? x.z : x.x, to[1] = h ? x.w : x.y;
  }
};

// 16 tokens, values 16 i to 16 i + 15, as two left operands in the order of Columns.
template <class U, class Row>
__device__ __forceinline__ void load_tokens_left(Left (&to)[2], const U* from, int i, int g, int q, Row row) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Vector<U, 4> x = load_vector<U, 4>(from + row(g + 8 * half) + 16 * i + 4 * q);
#pragma unroll
    for (int e = 0; e < 4; e++) to[e / 2][half + e % 2 * 2] = static_cast<float>(x.values[e]);
  }
}

template <class T>
__device__ __forceinline__ float2 load_two(const T* from) {
  const Vector<T, 2> x = load_vector<T, 2>(from);
  return make_float2(static_cast<float>(x.values[0]), static_cast<float>(x.values[1]));
}

template <class T>
__device__ __forceinline__ void store_scaled(float* to, float2 x, float2 factor) {
  constexpr bool split = kSplitGradients<T>;
  float2_at(to) = make_float2(operand<split>(x.x * factor.x), operand<split>(x.y * factor.y));
}

// Factors and scaled inputs: a warp has four tokens, a lane two keys.
template <class T>
__device__ __forceinline__ void scale_chunk(GradientShared& s, const ChunkGradients<T>& p, const Place<T>& c) {
  const int token = 4 * c.warp, key = 2 * c.lane;
  float2 in[6][4], sums[5];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const uint32_t at = c.row(token + t) + key;
#pragma unroll
    for (int input = 0; input < 6; input++) {
      if (input != kV) in[input][t] = load_two(p.in[input] + c.first + at);
    }
  }
  sums[0] = {0.0f, 0.0f};
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const float rate = token + t < c.n ? kLog2Decay : 0.0f;
    sums[t + 1] = {sums[t].x + rate * sigmoid_of(in[kW][t].x), sums[t].y + rate * sigmoid_of(in[kW][t].y)};
  }
  s.decays[c.warp][c.lane] = sums[4];
  __syncthreads();
  float2 start = {0.0f, 0.0f};  // counted from the middle of the chunk
#pragma unroll
  for (int other = 0; other < kGradientWarps; other++) {
    const float2 x = s.decays[other][c.lane];
    const float sign = other < 2 ? (other >= c.warp ? -1.0f : 0.0f) : (other < c.warp ? 1.0f : 0.0f);
    start.x += sign * x.x, start.y += sign * x.y;
  }
#pragma unroll
  for (int t = 0; t < 5; t++) sums[t] = {exp2_fast(sums[t].x + start.x), exp2_fast(sums[t].y + start.y)};
  if (c.warp == 0) float2_at(s.factor + key) = sums[0];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const int to = (token + t) * kWideRow + key;
    const float there = token + t < c.n ? 1.0f : 0.0f;
    const float2 before = {there * sums[t].x, there * sums[t].y}, here = {there * sums[t + 1].x, there * sums[t + 1].y};
    const float2 back = {there * reciprocal_fast(sums[t + 1].x), there * reciprocal_fast(sums[t + 1].y)};
    float2_at(s.factor + to + kWideRow) = sums[t + 1];
    store_scaled<T>(s.r + to, in[kR][t], here), store_scaled<T>(s.a + to, in[kA][t], before);
    store_scaled<T>(s.k + to, in[kK][t], back), store_scaled<T>(s.b + to, in[kB][t], back);
  }
}

}  // namespace cog_rwkv

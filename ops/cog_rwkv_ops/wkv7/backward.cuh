// The gradient of wkv7 on CUDA, chunk by chunk from the last to the first, given the state before each chunk.
//
// With the names of chunked.cuh, S_e the state of a chunk before its last factor and d for the gradient of what
// follows:
//   dS_e = dS diag(e^(G - m))       Z = T' (Q' dY + b~ dS_e')      dV = P' dY + tril(a~ k~', -1)' Z + k~ dS_e'
//   dr~ = dY S + tril(dY V') k~ + tril(dY U') b~                   da~ = Z S + tril(Z V', -1) k~ + tril(Z U', -1) b~
//   dk~ = V dS_e + tril(dY V')' r~ + tril(Z V', -1)' a~            db~ = U dS_e + tril(dY U')' r~ + tril(Z U', -1)' a~
//   dS <- (dS_e + dY' r~ + Z' a~) diag(e^m)
// T is never formed: U and Z come by substitution. The log-decay of a token has, per key, the sum over it and the later
// tokens of dr~ r~ - dk~ k~ - db~ b~, over the later ones of da~ a~, and over the values of dS_e S_e.
#pragma once

#include "produce.cuh"

namespace cog_rwkv {

constexpr int kBackwardThreads = 256;
constexpr int kWide = 68, kTight = 20;  // floats from a row of 64, of 16, to the next

template <class T>
struct Wkv7Backward {
  const T* in[6];       // r, w, k, v, a, b, each [batch, tokens, heads, 64]
  const T* d_y;         // the same
  const float* d_end;   // [batch, heads, 64, 64]: the gradient of the state after the last token
  const float* states;  // [batch, heads, chunks, 64, 64]: before each chunk
  T* out[6];            // gradients of `in`
  float* d_state;       // [batch, heads, 64, 64]
  int64_t tokens, heads, chunks;
};

struct BackwardShared {
  using Wide = float[kChunk * kWide];
  using Tight = float[kChunk * kTight];
  float state[kHead * kWide], d_state[kHead * kWide];  // value, key
  Wide r, k, v, a, b, d_y, u, z;
  float factor[(kChunk + 1) * kWide];  // e^(g - m); row t + 1 is token t
  Tight ab, ak, rb, rk, yv, yu, zv, zu;
  Wide d_log, d_log_before;  // of g at a token, and before it
  float d_total[5 * kHead];  // of G, in parts
};

// A matrix in shared memory, or its transpose.
struct View {
  const float* p;
  int row, column;
  __device__ __forceinline__ float operator()(int i, int j) const { return p[i * row + j * column]; }
};
__device__ __forceinline__ View wide(const float* p) { return {p, kWide, 1}; }
__device__ __forceinline__ View wide_transposed(const float* p) { return {p, 1, kWide}; }
__device__ __forceinline__ View tight(const float* p) { return {p, kTight, 1}; }
__device__ __forceinline__ View tight_transposed(const float* p) { return {p, 1, kTight}; }

// sums += a b, for a [16, depth] and b [depth, 8].
template <int depth>
__device__ __forceinline__ void add_product(Sums& sums, View a, View b, int lane) {
  const int g = lane / 4, q = lane % 4;
  Sums fine[2] = {};
#pragma unroll
  for (int k = 0; k < depth; k += 8) {
    const Left x = {a(g, k + q), a(g + 8, k + q), a(g, k + q + 4), a(g + 8, k + q + 4)};
    const Right y = {b(k + q, g), b(k + q + 4, g)};
    const Left small = {x[0] - big_part(x[0]), x[1] - big_part(x[1]), x[2] - big_part(x[2]), x[3] - big_part(x[3])};
    mma(fine[0], small, y);
    mma(fine[1], x, {y[0] - big_part(y[0]), y[1] - big_part(y[1])});
    mma(sums, x, y);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] += fine[0][i] + fine[1][i];
}

// f(i, row, column) for the four elements that a lane has of a result of 16 x 8.
template <class F>
__device__ __forceinline__ void each_of(int lane, F f) {
#pragma unroll
  for (int i = 0; i < 4; i++) f(i, lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
}

// The triangle of a b' for two matrices of tokens, columns 8 half to 8 half + 7.
__device__ __forceinline__ void store_triangle(float* to, const float* a, const float* b, bool diagonal, int half,
                                               int lane) {
  Sums sums = {};
  add_product<kHead>(sums, wide(a), wide_transposed(b + half * 8 * kWide), lane);
  each_of(lane, [&](int i, int row, int column) {
    column += half * 8;
    to[row * kTight + column] = column < row || (diagonal && column == row) ? sums[i] : 0.0f;
  });
}

// The lane's share of a chunk, on its way from global memory: it is asked for while the chunk before is computed.
template <class T>
struct Fetched {
  static constexpr int kInputs = kChunk * kHead / kBackwardThreads, kStates = kHead * kHead / kBackwardThreads;
  T in[6][kInputs], d_y[kInputs];
  float state[kStates];

  __device__ __forceinline__ void fetch(const Wkv7Backward<T>& p, int64_t first, int n, const float* from) {
#pragma unroll
    for (int j = 0; j < kInputs; j++) {
      const int i = threadIdx.x + j * kBackwardThreads, t = i / kHead;
      const int64_t at = first + (t < n ? t : 0) * p.heads * kHead + i % kHead;
#pragma unroll
      for (int input = 0; input < 6; input++) in[input][j] = p.in[input][at];
      d_y[j] = p.d_y[at];
    }
#pragma unroll
    for (int j = 0; j < kStates; j++) state[j] = from[threadIdx.x + j * kBackwardThreads];
  }
};

// e^(g - m) before the chunk and after each of its tokens: a thread a key.
__device__ inline void sum_factors(BackwardShared& s) {
  float* g = s.factor + threadIdx.x;
  float sums[kChunk + 1] = {0.0f};
#pragma unroll
  for (int t = 1; t <= kChunk; t++) sums[t] = sums[t - 1] + g[t * kWide];
#pragma unroll
  for (int t = 0; t <= kChunk; t++) g[t * kWide] = exp2_fast(sums[t] - sums[kChunk / 2]);
}

template <class T>
__device__ __forceinline__ void load_chunk(BackwardShared& s, const Fetched<T>& f, int n) {
  constexpr int kInputs = Fetched<T>::kInputs;
  const int key = threadIdx.x % kHead, row = threadIdx.x / kHead, rows = kBackwardThreads / kHead;
#pragma unroll
  for (int j = 0; j < kInputs; j++) {
    const int t = row + j * rows;
    s.factor[(t + 1) * kWide + key] = t < n ? log2_decay(static_cast<float>(f.in[kW][j])) : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x < kHead) sum_factors(s);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kInputs; j++) {
    const int t = row + j * rows, to = t * kWide + key;
    const bool inside = t < n;
    const float before = s.factor[to], here = s.factor[to + kWide], back = reciprocal_fast(here);
    const auto value = [&](const T& x) { return inside ? static_cast<float>(x) : 0.0f; };
    s.r[to] = value(f.in[kR][j]) * here, s.a[to] = value(f.in[kA][j]) * before;
    s.k[to] = value(f.in[kK][j]) * back, s.b[to] = value(f.in[kB][j]) * back;
    s.v[to] = value(f.in[kV][j]), s.d_y[to] = value(f.d_y[j]);
  }
  const float start = reciprocal_fast(s.factor[key]), end = s.factor[kChunk * kWide + key];
#pragma unroll
  for (int j = 0; j < Fetched<T>::kStates; j++) {
    const int to = (row + j * rows) * kWide + key;
    s.state[to] = f.state[j] * start;
    s.d_state[to] *= end;
  }
  __syncthreads();
}

// U from what it is without the tokens of its chunk, Z from what it is without those after: a thread a value.
__device__ inline void substitute(BackwardShared& s) {
  const int value = threadIdx.x % kHead;
  float x[kChunk];
  if (threadIdx.x < kHead) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      x[i] = s.u[i * kWide + value];
#pragma unroll
      for (int j = 0; j < i; j++) x[i] += s.ab[i * kTight + j] * x[j];
      s.u[i * kWide + value] = x[i];
    }
  } else if (threadIdx.x < 2 * kHead) {
#pragma unroll
    for (int i = kChunk - 1; i >= 0; i--) {
      x[i] = s.z[i * kWide + value];
#pragma unroll
      for (int j = i + 1; j < kChunk; j++) x[i] += s.ab[j * kTight + i] * x[j];
      s.z[i * kWide + value] = x[i];
    }
  }
}

// a~ b~', a~ k~', r~ b~', r~ k~', U and Z. A warp has 8 columns of each product, values here.
__device__ inline void recompute(BackwardShared& s, int warp, int lane) {
  const int half = warp % 2;
  if (warp < 2) store_triangle(s.ab, s.a, s.b, false, half, lane);
  if (warp / 2 == 1) store_triangle(s.ak, s.a, s.k, false, half, lane);
  if (warp / 2 == 2) store_triangle(s.rb, s.r, s.b, true, half, lane);
  if (warp / 2 == 3) store_triangle(s.rk, s.r, s.k, true, half, lane);
  // The part of G's gradient that the state before the chunk has.
  const int key = threadIdx.x % kHead, quarter = threadIdx.x / kHead;
  float sum = 0.0f;
#pragma unroll
  for (int v = quarter * 16; v < quarter * 16 + 16; v++) sum += s.d_state[v * kWide + key] * s.state[v * kWide + key];
  s.d_total[quarter * kHead + key] = sum;
  __syncthreads();

  const int value = warp * 8;
  Sums u = {}, z = {};
  add_product<kHead>(u, wide(s.a), wide_transposed(s.state + value * kWide), lane);
  add_product<kChunk>(u, tight(s.ak), wide(s.v + value), lane);
  add_product<kHead>(z, wide(s.b), wide_transposed(s.d_state + value * kWide), lane);
  add_product<kChunk>(z, tight_transposed(s.rb), wide(s.d_y + value), lane);
  each_of(lane, [&](int i, int row, int column) {
    s.u[row * kWide + value + column] = u[i];
    s.z[row * kWide + value + column] = z[i];
  });
  __syncthreads();
  substitute(s);
  __syncthreads();
  if (warp < 2) store_triangle(s.yv, s.d_y, s.v, true, half, lane);
  if (warp / 2 == 1) store_triangle(s.yu, s.d_y, s.u, true, half, lane);
  if (warp / 2 == 2) store_triangle(s.zv, s.z, s.v, false, half, lane);
  if (warp / 2 == 3) store_triangle(s.zu, s.z, s.u, false, half, lane);
  __syncthreads();
}

// All gradients of the chunk but those of w, whose parts are left in d_log, d_log_before and d_total. A warp has 8
// keys, or values.
template <class T>
__device__ void write_gradients(BackwardShared& s, const Wkv7Backward<T>& p, int64_t first, int n, int warp, int lane) {
  const int key = warp * 8;
  Sums r = {}, a = {}, k = {}, b = {}, v = {};
  add_product<kHead>(r, wide(s.d_y), wide(s.state + key), lane);
  add_product<kChunk>(r, tight(s.yv), wide(s.k + key), lane);
  add_product<kChunk>(r, tight(s.yu), wide(s.b + key), lane);
  add_product<kHead>(a, wide(s.z), wide(s.state + key), lane);
  add_product<kChunk>(a, tight(s.zv), wide(s.k + key), lane);
  add_product<kChunk>(a, tight(s.zu), wide(s.b + key), lane);
  add_product<kHead>(k, wide(s.v), wide(s.d_state + key), lane);
  add_product<kHead>(b, wide(s.u), wide(s.d_state + key), lane);
  float total[2] = {0.0f, 0.0f};
  each_of(lane, [&](int i, int row, int column) {
    const int at = row * kWide + key + column;
    total[i % 2] += k[i] * s.k[at] + b[i] * s.b[at];
  });
#pragma unroll
  for (int lanes = 4; lanes < kWarp; lanes *= 2) {
    total[0] += __shfl_xor_sync(0xffffffffu, total[0], lanes);
    total[1] += __shfl_xor_sync(0xffffffffu, total[1], lanes);
  }
  if (lane < 4) s.d_total[4 * kHead + key + 2 * lane] = total[0], s.d_total[4 * kHead + key + 2 * lane + 1] = total[1];
  add_product<kChunk>(k, tight_transposed(s.yv), wide(s.r + key), lane);
  add_product<kChunk>(k, tight_transposed(s.zv), wide(s.a + key), lane);
  add_product<kChunk>(b, tight_transposed(s.yu), wide(s.r + key), lane);
  add_product<kChunk>(b, tight_transposed(s.zu), wide(s.a + key), lane);
  add_product<kHead>(v, wide(s.k), wide_transposed(s.d_state + key * kWide), lane);
  add_product<kChunk>(v, tight_transposed(s.rk), wide(s.d_y + key), lane);
  add_product<kChunk>(v, tight_transposed(s.ak), wide(s.z + key), lane);
  each_of(lane, [&](int i, int row, int column) {
    const int at = row * kWide + key + column;
    s.d_log[at] = r[i] * s.r[at] - k[i] * s.k[at] - b[i] * s.b[at];
    s.d_log_before[at] = a[i] * s.a[at];
    if (row >= n) return;
    const int64_t to = first + row * p.heads * kHead + key + column;
    const float here = s.factor[at + kWide], back = reciprocal_fast(here);
    p.out[kR][to] = static_cast<T>(r[i] * here);
    p.out[kA][to] = static_cast<T>(a[i] * s.factor[at]);
    p.out[kK][to] = static_cast<T>(k[i] * back);
    p.out[kB][to] = static_cast<T>(b[i] * back);
    p.out[kV][to] = static_cast<T>(v[i]);
  });
  __syncthreads();
}

// The gradient of w, from those of the sums of log-decays: a thread a key.
template <class T>
__device__ void write_decay_gradient(const BackwardShared& s, const Wkv7Backward<T>& p, int64_t first, int n) {
  const int key = threadIdx.x;
  float sum = 0.0f;
  for (int i = 0; i < 5; i++) sum += s.d_total[i * kHead + key];
  for (int t = kChunk - 1; t >= 0; t--) {
    sum += s.d_log[t * kWide + key];
    if (t < n) {
      const int64_t at = first + t * p.heads * kHead + key;
      const float rate = sigmoid(static_cast<float>(p.in[kW][at]));
      p.out[kW][at] = static_cast<T>(-0.60653066f * sum * rate * (1.0f - rate));
    }
    sum += s.d_log_before[t * kWide + key];
  }
}

__device__ inline void step_gradient(BackwardShared& s, int warp, int lane) {
  const int value = warp % 4 * 16;
  for (int tile = warp / 4 * 4; tile < warp / 4 * 4 + 4; tile++) {
    Sums sums = {};
    add_product<kChunk>(sums, wide_transposed(s.d_y + value), wide(s.r + tile * 8), lane);
    add_product<kChunk>(sums, wide_transposed(s.z + value), wide(s.a + tile * 8), lane);
    each_of(lane, [&](int i, int row, int column) {
      float& x = s.d_state[(value + row) * kWide + tile * 8 + column];
      x = (x + sums[i]) * reciprocal_fast(s.factor[tile * 8 + column]);
    });
  }
}

// A block a sequence and head.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 2) wkv7_backward_kernel(const Wkv7Backward<T> p) {
  extern __shared__ __align__(16) float memory[];
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(memory);
  const int64_t block = blockIdx.x, sequence = block / p.heads, head = block % p.heads;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  constexpr int kState = static_cast<int>(kHead * kHead);
  for (int i = threadIdx.x; i < kState; i += kBackwardThreads)
    s.d_state[i / kHead * kWide + i % kHead] = p.d_end[block * kState + i];
  Fetched<T> next;
  const auto first_of = [&](int64_t chunk) {
    return ((sequence * p.tokens + chunk * kChunk) * p.heads + head) * kHead;
  };
  const auto tokens_of = [&](int64_t chunk) {
    return static_cast<int>(min(p.tokens - chunk * kChunk, int64_t{kChunk}));
  };
  const auto fetch = [&](int64_t chunk) {
    next.fetch(p, first_of(chunk), tokens_of(chunk), p.states + (block * p.chunks + chunk) * kState);
  };
  if (p.chunks > 0) fetch(p.chunks - 1);
  for (int64_t chunk = p.chunks - 1; chunk >= 0; chunk--) {
    const int64_t first = first_of(chunk);
    const int n = tokens_of(chunk);
    load_chunk(s, next, n);
    if (chunk > 0) fetch(chunk - 1);
    recompute(s, warp, lane);
    write_gradients(s, p, first, n, warp, lane);
    if (threadIdx.x < kHead) write_decay_gradient(s, p, first, n);
    step_gradient(s, warp, lane);
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kState; i += kBackwardThreads)
    p.d_state[block * kState + i] = s.d_state[i / kHead * kWide + i % kHead];
}

}  // namespace cog_rwkv

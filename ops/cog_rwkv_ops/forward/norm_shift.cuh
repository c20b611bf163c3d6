// The residual sum, the layer norm, the token shift and its mixes, in one kernel: what stands between two matrix
// products of RWKV-7. W is the dtype of the activations, float16 or bfloat16; the residual stream is float32.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/packed.cuh"
#include "../csrc/reduce.cuh"

namespace cog_rwkv {

constexpr int kNormThreads = 256;
constexpr int kMostVectors = 8;  // fours of channels a thread: rows of up to 8192

// What a product left for the residual stream: `slices` partial sums of [n, c], added in order and multiplied by
// `scale`. Float32, or W where `rounded`, which has one slice. No slices: there is nothing to add.
struct Delta {
  const void* values = nullptr;
  int slices = 0;
  bool rounded = false;
  float scale = 1.0f;
};

template <class W>
struct NormShift {
  const float* x;  // [n, c]
  Delta delta;
  float* x_out;                      // [n, c], another tensor than x; or null
  const float *weight, *bias, *mix;  // [c], [c], [mixes, c]
  float* shift;                      // [pool_rows, c], rows `stride` apart
  const int64_t *rows, *cu_seqlens;  // [batch], [batch + 1]; cu_seqlens null: a token each
  W* out;                            // [mixes, n, c]
  int64_t n, c, mixes, stride, batch, pool_rows;
  int64_t each;  // tokens a block walks through
  int parts;     // blocks that share a token, each with some of its channels; 1 where a block has several tokens
  float eps, out_scale;
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator*(float4 a, float f) {
  return make_float4(a.x * f, a.y * f, a.z * f, a.w * f);
}

// f of four pairs.
template <class F>
__device__ __forceinline__ float4 each4(float4 a, float4 b, F f) {
  return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}

__device__ __forceinline__ float4 float4_of(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <class W>
__device__ __forceinline__ float4 float4_of(const W* p) {
  const Vector<W, 4> v = load_vector<W, 4>(p);
  return make_float4(v.values[0], v.values[1], v.values[2], v.values[3]);
}

template <class W>
__device__ __forceinline__ void store_rounded(W* p, float4 v) {
  store_vector<W, 4>(p, {{static_cast<W>(v.x), static_cast<W>(v.y), static_cast<W>(v.z), static_cast<W>(v.w)}});
}

// Channels 4 * i to 4 * i + 3 of token t: the residual stream with what is to be added.
template <class W>
__device__ __forceinline__ float4 residual(const NormShift<W>& p, int64_t t, int64_t i) {
  const int64_t at = t * p.c + 4 * i;
  const float4 x = float4_of(p.x + at);
  if (p.delta.slices == 0) return x;
  if (p.delta.rounded) return x + float4_of(static_cast<const W*>(p.delta.values) + at) * p.delta.scale;
  const float* slice = static_cast<const float*>(p.delta.values) + at;
  float4 sum = float4_of(slice);
  for (int s = 1; s < p.delta.slices; s++) sum = sum + float4_of(slice + s * p.n * p.c);
  return x + sum * p.delta.scale;
}

// A block's share of the channels of a token, in fours: thread `threadIdx.x` has those at threadIdx.x + j * 256.
struct Channels {
  int64_t fours, first, end;

  __device__ Channels(int64_t c, int parts) : fours(c / 4), first(0), end(fours) {
    const int64_t each = (fours + parts - 1) / parts;
    first = min(blockIdx.y * each, fours), end = min(first + each, fours);
  }
  __device__ bool exists(int64_t i) const { return i < fours; }
  __device__ bool mine(int64_t i) const { return first <= i && i < end; }
};

__device__ __forceinline__ int64_t four_of(int j) { return threadIdx.x + j * int64_t{kNormThreads}; }

// The residual stream of token t, and its layer norm, which every block of the token computes for itself.
template <class W, int V>
__device__ void normalize(const NormShift<W>& p, const Channels& channels, int64_t t, float4 (&x)[V], float4 (&y)[V],
                          float* shared) {
  float total = 0.0f, squares = 0.0f;
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.exists(four_of(j))) continue;
    x[j] = residual(p, t, four_of(j));
    total += (x[j].x + x[j].y) + (x[j].z + x[j].w);
  }
  const float mean = reduce_block(total, Add{}, shared) / static_cast<float>(p.c);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.exists(four_of(j))) continue;
    y[j] = make_float4(x[j].x - mean, x[j].y - mean, x[j].z - mean, x[j].w - mean);
    squares += (y[j].x * y[j].x + y[j].y * y[j].y) + (y[j].z * y[j].z + y[j].w * y[j].w);
  }
  const float variance = reduce_block(squares, Add{}, shared) / static_cast<float>(p.c);
  const float scale = 1.0f / sqrtf(variance + p.eps);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.mine(four_of(j))) continue;
    const float4 weight = float4_of(p.weight + 4 * four_of(j)), bias = float4_of(p.bias + 4 * four_of(j));
    y[j] = each4(y[j], weight, [&](float d, float w) { return d * scale * w; }) + bias;
  }
}

// The sequence that token t is in; not row_ok where there is none.
template <class W>
__device__ __forceinline__ Sequence sequence_at_token(const NormShift<W>& p, int64_t t) {
  if (p.cu_seqlens == nullptr) {
    const int64_t row = p.rows[t];
    return {t, t + 1, row, row >= 0 && row < p.pool_rows};
  }
  const int64_t i = sequence_of(p.cu_seqlens, p.batch, t);
  Sequence s{0, 0, 0, false};
  if (i >= 0) s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
  s.row_ok = s.row_ok && s.begin <= t && t < s.end;
  return s;
}

// What a thread will read of the weights, into L2: memory is busy with the product before this kernel, not with them.
template <class W, int V>
__device__ __forceinline__ void prefetch_weights(const NormShift<W>& p, const Channels& channels) {
#pragma unroll
  for (int j = 0; j < V; j++) {
    const int64_t c = 4 * four_of(j);
    if (!channels.mine(four_of(j)) || c % 32 != 0) continue;  // a line of 128 bytes
    prefetch_l2(p.weight + c), prefetch_l2(p.bias + c);
    for (int64_t m = 0; m < p.mixes; m++) prefetch_l2(p.mix + m * p.c + c);
  }
}

// A token's mixes, times `out_scale`, from its normalised row and that of the token before it.
template <class W>
__device__ __forceinline__ void mix_channels(const NormShift<W>& p, int64_t t, int64_t c, float4 now, float4 before) {
  const float4 back = each4(before, now, [](float b, float n) { return b - n; });
  for (int64_t m = 0; m < p.mixes; m++) {
    const float4 mix = float4_of(p.mix + m * p.c + c);
    const float4 mixed = now + each4(back, mix, [](float d, float f) { return d * f; });
    store_rounded(p.out + (m * p.n + t) * p.c + c, mixed * p.out_scale);
  }
}

// Row -1 is padding of a batch: its activations are zero, and it has no state.
__device__ __forceinline__ bool is_padding(const Sequence& s) { return s.row == -1; }

// A block a run of tokens, or a part of the channels of one. The state's row of a sequence is read by who has its
// first token and written by who has its last, and these may be two blocks: where a sequence goes on beyond a block's
// tokens, `last_kernel` writes the row, once all have been read.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_shift_kernel(const NormShift<W> p) {
  __shared__ float shared[32];
  const Channels channels(p.c, p.parts);
  prefetch_weights<W, V>(p, channels);
  wait_for_previous();
  let_next_begin();
  const int64_t first = blockIdx.x * p.each, end = min(first + p.each, p.n);
  float4 x[V], now[V], before[V];
  Sequence s = sequence_at_token(p, first);
  if (s.row_ok && s.begin < first) normalize(p, channels, first - 1, x, before, shared);
  for (int64_t t = first; t < end; t++) {
    if (t > first && t >= s.end) s = sequence_at_token(p, t);
    normalize(p, channels, t, x, now, shared);
#pragma unroll
    for (int j = 0; j < V; j++) {
      const int64_t c = 4 * four_of(j);
      if (!channels.mine(four_of(j))) continue;
      if (p.x_out != nullptr) *reinterpret_cast<float4*>(p.x_out + t * p.c + c) = x[j];
      float* state = p.shift + s.row * p.stride + c;
      if (!s.row_ok) {
        before[j] = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
        if (is_padding(s)) now[j] = before[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      } else if (t == s.begin) {
        before[j] = float4_of(state);
      }
      mix_channels(p, t, c, now[j], before[j]);
      if (s.row_ok && t == s.end - 1 && s.begin >= first) *reinterpret_cast<float4*>(state) = now[j];
      before[j] = now[j];
    }
  }
}

// The last normalised token of each sequence that began in another block than it ends in: a block a sequence.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) last_kernel(const NormShift<W> p) {
  __shared__ float shared[32];
  wait_for_previous();
  let_next_begin();
  const Sequence s = sequence_at(p.rows, p.cu_seqlens, blockIdx.x, p.n, p.pool_rows);
  if (!s.row_ok || s.begin == s.end || s.begin / p.each == (s.end - 1) / p.each) return;
  const Channels channels(p.c, 1);
  float4 x[V], now[V];
  normalize(p, channels, s.end - 1, x, now, shared);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (channels.mine(four_of(j))) *reinterpret_cast<float4*>(p.shift + s.row * p.stride + 4 * four_of(j)) = now[j];
  }
}

// The layer norm of some tokens alone: `out` is [count, c]. Without `cu_seqlens` it is all tokens, else the last of
// each sequence; NaN where there is none.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormShift<W> p) {
  __shared__ float shared[32];
  const Channels channels(p.c, p.parts);
  prefetch_weights<W, V>(p, channels);
  wait_for_previous();
  let_next_begin();
  int64_t t = blockIdx.x;
  bool ok = true;
  if (p.cu_seqlens != nullptr) {
    const Sequence s = sequence_at(p.rows, p.cu_seqlens, t, p.n, p.pool_rows);
    ok = s.begin < s.end;
    t = ok ? s.end - 1 : 0;
  }
  float4 x[V], now[V];
  normalize(p, channels, t, x, now, shared);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.mine(four_of(j))) continue;
    const float4 nothing = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
    store_rounded(p.out + blockIdx.x * p.c + 4 * four_of(j), ok ? now[j] : nothing);
  }
}

template <class W>
using NormKernel = void (*)(const NormShift<W>);

// The instance for rows of c channels: `pick` is called with std::integral_constant of the fours a thread has.
template <class F>
auto for_width(int64_t c, F pick) {
  const int64_t fours = (c / 4 + kNormThreads - 1) / kNormThreads;
  if (fours <= 1) return pick(std::integral_constant<int, 1>{});
  if (fours <= 2) return pick(std::integral_constant<int, 2>{});
  if (fours <= 4) return pick(std::integral_constant<int, 4>{});
  return pick(std::integral_constant<int, kMostVectors>{});
}

// How a launch is cut: several blocks a token where tokens are few, several tokens a block where they are many and
// follow each other, as each block computes the token before its first one again.
template <class W>
void cut(NormShift<W>& p, int64_t tokens, int multiprocessors) {
  const int64_t most = std::min<int64_t>((p.c + 255) / 256, 8);  // parts of at least 256 channels
  p.parts = static_cast<int>(std::clamp<int64_t>(multiprocessors / tokens, 1, most));
  const bool walks = p.cu_seqlens != nullptr && p.parts == 1;
  p.each = walks ? std::clamp<int64_t>(tokens / (4 * multiprocessors), 1, 16) : 1;
}

template <class W>
void norm_shift(const char* op, cudaStream_t stream, NormShift<W> p, int multiprocessors) {
  cut(p, p.n, multiprocessors);
  const dim3 grid(static_cast<unsigned>((p.n + p.each - 1) / p.each), static_cast<unsigned>(p.parts));
  const auto kernel = for_width(p.c, [](auto v) -> NormKernel<W> { return norm_shift_kernel<W, v()>; });
  launch_chained(op, stream, kernel, grid, dim3(kNormThreads), 0, p);
  if (p.cu_seqlens == nullptr || p.batch == 0) return;
  const auto last = for_width(p.c, [](auto v) -> NormKernel<W> { return last_kernel<W, v()>; });
  launch_chained(op, stream, last, dim3(static_cast<unsigned>(p.batch)), dim3(kNormThreads), 0, p);
}

// `count` rows of layer norm, as norm_kernel says.
template <class W>
void norm_rows(const char* op, cudaStream_t stream, NormShift<W> p, int64_t count, int multiprocessors) {
  cut(p, count, multiprocessors);
  const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(p.parts));
  const auto kernel = for_width(p.c, [](auto v) -> NormKernel<W> { return norm_kernel<W, v()>; });
  launch_chained(op, stream, kernel, grid, dim3(kNormThreads), 0, p);
}

}  // namespace cog_rwkv

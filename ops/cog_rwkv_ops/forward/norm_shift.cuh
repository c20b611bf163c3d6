// The residual sum, the layer norm, the token shift and its mixes, in one kernel: what stands between two matrix
// products of RWKV-7. W is the dtype of the activations, float16 or bfloat16; the residual stream is float32.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/packed.cuh"
#include "../csrc/reduce.cuh"

namespace cog_rwkv {

constexpr int kNormThreads = 512;  // at most
constexpr int kMostVectors = 4;    // fours of channels a thread: rows of up to 8192
constexpr int kMostMixes = 6;

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
  float eps, out_scale, inverse_c;  // 1 / c
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

// Channels c to c + 3 of token t: the residual stream with what is to be added.
// `ahead`: partial sums that are on their way at once.
template <int ahead, class W>
__device__ __forceinline__ float4 residual(const NormShift<W>& p, int64_t t, uint32_t c) {
  const int64_t at = t * p.c + c;
  const float4 x = float4_of(p.x + at);
  if (p.delta.slices == 0) return x;
  if (p.delta.rounded) return x + float4_of(static_cast<const W*>(p.delta.values) + at) * p.delta.scale;
  const float* slice = static_cast<const float*>(p.delta.values) + at;
  float4 sum = float4_of(slice);
  for (int s = 1; s < p.delta.slices; s += ahead) {
    float4 parts[ahead];
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      if (s + i < p.delta.slices) parts[i] = float4_of(slice + (s + i) * p.n * p.c);
    }
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      if (s + i < p.delta.slices) sum = sum + parts[i];
    }
  }
  return x + sum * p.delta.scale;
}

// The channels of a token in fours, in the order in which a block goes through them: from its own share around to it
// again. Thread `threadIdx.x` has those at threadIdx.x + j * blockDim.x, and computes the results of those in the
// share.
struct Channels {
  uint32_t fours, first, count;

  __device__ Channels(int64_t c, int parts) : fours(static_cast<uint32_t>(c / 4)), first(0), count(fours) {
    const uint32_t each = (fours + parts - 1) / parts;
    first = min(blockIdx.y * each, fours), count = min(each, fours - first);
  }
  __device__ __forceinline__ bool exists(int j) const { return place(j) < fours; }
  __device__ __forceinline__ bool mine(int j) const { return place(j) < count; }
  __device__ __forceinline__ uint32_t channel(int j) const {
    const uint32_t at = first + place(j);
    return 4 * (at < fours ? at : at - fours);
  }

 private:
  __device__ __forceinline__ uint32_t place(int j) const { return threadIdx.x + j * blockDim.x; }
};

// The weights of four channels.
template <class W>
struct ChannelWeights {
  float4 weight, bias, mix[kMostMixes];

  __device__ __forceinline__ void load(const NormShift<W>& p, uint32_t c) {
    weight = float4_of(p.weight + c), bias = float4_of(p.bias + c);
#pragma unroll
    for (int m = 0; m < kMostMixes; m++) {
      if (m < p.mixes) mix[m] = float4_of(p.mix + m * p.c + c);
    }
  }
  // Into L2: memory is busy with the product before this kernel, not with these.
  __device__ __forceinline__ static void prefetch(const NormShift<W>& p, uint32_t c) {
    if (c % 32 != 0) return;  // a line of 128 bytes
    prefetch_l2(p.weight + c), prefetch_l2(p.bias + c);
    for (int m = 0; m < p.mixes; m++) prefetch_l2(p.mix + m * p.c + c);
  }
};

// The residual stream of token t, and the inverse of its standard deviation; `y` is without its mean.
template <class W, int V>
__device__ float normalize(const NormShift<W>& p, const Channels& channels, int64_t t, float4 (&x)[V], float4 (&y)[V],
                           float* shared) {
  float total = 0.0f, squares = 0.0f;
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.exists(j)) continue;
    x[j] = residual<8 / V>(p, t, channels.channel(j));
    total += (x[j].x + x[j].y) + (x[j].z + x[j].w);
  }
  const float mean = reduce_block(total, Add{}, shared) * p.inverse_c;
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.exists(j)) continue;
    y[j] = make_float4(x[j].x - mean, x[j].y - mean, x[j].z - mean, x[j].w - mean);
    squares += (y[j].x * y[j].x + y[j].y * y[j].y) + (y[j].z * y[j].z + y[j].w * y[j].w);
  }
  const float variance = reduce_block(squares, Add{}, shared) * p.inverse_c;
  return rsqrtf(variance + p.eps);
}

template <class W>
__device__ __forceinline__ float4 scaled(float4 y, float scale, const ChannelWeights<W>& w) {
  return each4(y, w.weight, [&](float d, float f) { return d * scale * f; }) + w.bias;
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

// A token's mixes, times `out_scale`, from its normalised row and that of the token before it.
template <class W>
__device__ __forceinline__ void mix_channels(const NormShift<W>& p, const ChannelWeights<W>& w, int64_t t, uint32_t c,
                                             float4 now, float4 before) {
  const float4 back = each4(before, now, [](float b, float n) { return b - n; });
#pragma unroll
  for (int m = 0; m < kMostMixes; m++) {
    if (m >= p.mixes) break;
    const float4 mixed = now + each4(back, w.mix[m], [](float d, float f) { return d * f; });
    store_rounded(p.out + (m * p.n + t) * p.c + c, mixed * p.out_scale);
  }
}

// Row -1 is padding of a batch: its activations are zero, and it has no state.
__device__ __forceinline__ bool is_padding(const Sequence& s) { return s.row == -1; }

// A block a run of tokens, or a part of the channels of one. The state's row of a sequence is read by who has its
// first token and written by who has its last, and these may be two blocks: where a sequence goes on beyond a block's
// tokens, `last_kernel` writes the row, once all have been read.
//
// The first state is read before the wait, and so are a thread's weights where they are few enough to be kept.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_shift_kernel(const NormShift<W> p) {
  __shared__ float shared[32];
  const Channels channels(p.c, p.parts);
  const int64_t first = blockIdx.x * p.each, end = min(first + p.each, p.n);
  Sequence s = sequence_at_token(p, first);
  constexpr bool kept = V <= 2;
  ChannelWeights<W> weights[kept ? V : 1];
  float4 x[V], now[V], before[V];
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.mine(j)) continue;
    const uint32_t c = channels.channel(j);
    if (s.row_ok) before[j] = float4_of(p.shift + s.row * p.stride + c);
    if constexpr (kept) {
      weights[j].load(p, c);
    } else {
      ChannelWeights<W>::prefetch(p, c);
    }
  }
  wait_for_previous();
  let_next_begin();
  // A run in the middle of a sequence begins with the token before it, which is another block's to write.
  for (int64_t t = s.row_ok && s.begin < first ? first - 1 : first; t < end; t++) {
    if (t > first && t >= s.end) s = sequence_at_token(p, t);
    const float scale = normalize(p, channels, t, x, now, shared);
#pragma unroll
    for (int j = 0; j < V; j++) {
      if (!channels.mine(j)) continue;
      const uint32_t c = channels.channel(j);
      ChannelWeights<W>& w = weights[kept ? j : 0];
      if constexpr (!kept) w.load(p, c);
      float4 y = scaled(now[j], scale, w);
      if (t >= first) {
        float* state = p.shift + s.row * p.stride + c;
        if (!s.row_ok) {
          before[j] = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
          if (is_padding(s)) y = before[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else if (t == s.begin && t > first) {
          before[j] = float4_of(state);
        }
        if (p.x_out != nullptr) *reinterpret_cast<float4*>(p.x_out + t * p.c + c) = x[j];
        mix_channels(p, w, t, c, y, before[j]);
        if (s.row_ok && t == s.end - 1 && s.begin >= first) *reinterpret_cast<float4*>(state) = y;
      }
      before[j] = y;
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
  ChannelWeights<W> weights;
  float4 x[V], now[V];
  const float scale = normalize(p, channels, s.end - 1, x, now, shared);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.mine(j)) continue;
    const uint32_t c = channels.channel(j);
    weights.load(p, c);
    *reinterpret_cast<float4*>(p.shift + s.row * p.stride + c) = scaled(now[j], scale, weights);
  }
}

// The layer norm of some tokens alone: `out` is [count, c]. Without `cu_seqlens` it is all tokens, else the last of
// each sequence; NaN where there is none. There are no mixes.
template <class W, int V>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormShift<W> p) {
  __shared__ float shared[32];
  const Channels channels(p.c, p.parts);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (channels.mine(j)) ChannelWeights<W>::prefetch(p, channels.channel(j));
  }
  wait_for_previous();
  let_next_begin();
  int64_t t = blockIdx.x;
  bool ok = true;
  if (p.cu_seqlens != nullptr) {
    const Sequence s = sequence_at(p.rows, p.cu_seqlens, t, p.n, p.pool_rows);
    ok = s.begin < s.end;
    t = ok ? s.end - 1 : 0;
  }
  ChannelWeights<W> weights;
  float4 x[V], now[V];
  const float scale = normalize(p, channels, t, x, now, shared);
#pragma unroll
  for (int j = 0; j < V; j++) {
    if (!channels.mine(j)) continue;
    const uint32_t c = channels.channel(j);
    weights.load(p, c);
    const float4 y = scaled(now[j], scale, weights), nothing = make_float4(nanf(""), nanf(""), nanf(""), nanf(""));
    store_rounded(p.out + blockIdx.x * p.c + c, ok ? y : nothing);
  }
}

template <class W>
using NormKernel = void (*)(const NormShift<W>);

// The fours of channels that a thread has in rows of c channels: 1, 2 or 4.
inline int vectors_for(int64_t c) { return c <= 4 * kNormThreads ? 1 : c <= 8 * kNormThreads ? 2 : kMostVectors; }

// The instance for it: `pick` is called with a std::integral_constant.
template <class F>
auto for_width(int64_t c, F pick) {
  const int vectors = vectors_for(c);
  if (vectors == 1) return pick(std::integral_constant<int, 1>{});
  if (vectors == 2) return pick(std::integral_constant<int, 2>{});
  return pick(std::integral_constant<int, kMostVectors>{});
}

inline dim3 threads_for(int64_t c) {
  const int64_t warp = 32 * 4 * vectors_for(c);
  return dim3(static_cast<unsigned>((c + warp - 1) / warp * 32));
}

// How a launch is cut: several blocks a token where tokens are few; where they are many a block takes several, so that
// it loads the weights once, and where they follow each other computes the token before its first one again for few.
template <class W>
void cut(NormShift<W>& p, int64_t tokens, int multiprocessors, bool walks) {
  const int64_t most = std::min<int64_t>((p.c + 255) / 256, 8);  // parts of at least 256 channels
  p.parts = static_cast<int>(std::clamp<int64_t>(multiprocessors / tokens, 1, most));
  const int64_t at_once = multiprocessors * std::max<int64_t>(kNormThreads / threads_for(p.c).x, 1);
  p.each = walks && p.parts == 1 ? (tokens + at_once - 1) / at_once : 1;
}

template <class W>
void norm_shift(const char* op, cudaStream_t stream, NormShift<W> p, int multiprocessors) {
  cut(p, p.n, multiprocessors, true);
  const dim3 grid(static_cast<unsigned>((p.n + p.each - 1) / p.each), static_cast<unsigned>(p.parts));
  const auto kernel = for_width(p.c, [](auto v) -> NormKernel<W> { return norm_shift_kernel<W, v()>; });
  launch_chained(op, stream, kernel, grid, threads_for(p.c), 0, p);
  if (p.cu_seqlens == nullptr || p.batch == 0) return;
  const auto last = for_width(p.c, [](auto v) -> NormKernel<W> { return last_kernel<W, v()>; });
  launch_chained(op, stream, last, dim3(static_cast<unsigned>(p.batch)), threads_for(p.c), 0, p);
}

// `count` rows of layer norm, as norm_kernel says.
template <class W>
void norm_rows(const char* op, cudaStream_t stream, NormShift<W> p, int64_t count, int multiprocessors) {
  cut(p, count, multiprocessors, false);
  const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(p.parts));
  const auto kernel = for_width(p.c, [](auto v) -> NormKernel<W> { return norm_kernel<W, v()>; });
  launch_chained(op, stream, kernel, grid, threads_for(p.c), 0, p);
}

}  // namespace cog_rwkv

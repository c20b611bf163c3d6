// wkv4 and wkv4_backward on CUDA. Time is cut into segments: each is summed from nothing, the sums are put together,
// and each is walked again from its true start. A block has 32 channels and all segments of a sequence.
#include "wkv4.h"

#include "../csrc/cuda.cuh"

namespace cog_rwkv {
namespace {

constexpr int kChannels = 32, kSegments = 32;
constexpr float kNothing = -1e38f;  // the exponent of sums of nothing

// Sums a and b of what a channel has seen, both times e^-p.
struct Sums4 {
  float a = 0.0f, b = 0.0f, p = kNothing;

  // Decays by `rate`, and gets e^exponent times x and y.
  __device__ void add(float rate, float exponent, float x, float y) {
    const float next = fmaxf(p - rate, exponent), before = expf(p - rate - next), now = expf(exponent - next);
    a = before * a + now * x;
    b = before * b + now * y;
    p = next;
  }
};

// What a token reads of the sums before it.
struct Read4 {
  float y, own, q, scale;  // own: its share in the denominator; q: the exponent; scale: 1 / denominator

  __device__ Read4(const Sums4& s, float u, float k, float v) {
    q = fmaxf(s.p, u + k);
    const float before = expf(s.p - q);
    own = expf(u + k - q);
    scale = 1.0f / (before * s.b + own);
    y = (before * s.a + own * v) * scale;
  }
};

template <class T>
struct Wkv4 {
  const float *w, *u, *state;  // [C], [C], [B, 3, C]
  const T *k, *v;              // [B, T, C]
  int64_t tokens, channels, segment;
  float* end;
  T* y;
  // The backward has these as well.
  const T* d_y;
  const float* d_end;
  float *kept, *d_w, *d_u, *d_state;  // kept: [3, B, T, C], the sums before each token
  T *d_k, *d_v;
};

// A thread's channel and its tokens.
struct Place4 {
  int64_t channel, sequence, begin, end;
  int segment;
  bool inside;

  template <class T>
  __device__ explicit Place4(const Wkv4<T>& p) {
    channel = static_cast<int64_t>(blockIdx.x) * kChannels + threadIdx.x;
    sequence = blockIdx.y, segment = threadIdx.y;
    inside = channel < p.channels;
    begin = min(segment * p.segment, p.tokens), end = inside ? min(begin + p.segment, p.tokens) : begin;
  }
  template <class T>
  __device__ int64_t at(const Wkv4<T>& p, int64_t t) const {
    return (sequence * p.tokens + t) * p.channels + channel;
  }
  // Of a in the state; b and p are p.channels and 2 p.channels further.
  template <class T>
  __device__ int64_t state(const Wkv4<T>& p) const {
    return sequence * 3 * p.channels + channel;
  }
};

// `all` takes the sums of each segment; the result is `start` with those of the segments before this one, or behind it.
__device__ Sums4 gather(Sums4 (*all)[kChannels], const Sums4& mine, Sums4 start, float rate, int64_t length,
                        int64_t tokens, bool behind) {
  const int segment = threadIdx.y;
  all[segment][threadIdx.x] = mine;
  __syncthreads();
  for (int i = behind ? kSegments - 1 : 0; i != segment; i += behind ? -1 : 1) {
    const int64_t count = min(length, tokens - i * length);
    if (count <= 0) continue;
    const Sums4 s = all[i][threadIdx.x];
    const float decayed = start.p - rate * static_cast<float>(count), next = fmaxf(decayed, s.p);
    const float before = expf(decayed - next), now = expf(s.p - next);
    start.a = before * start.a + now * s.a;
    start.b = before * start.b + now * s.b;
    start.p = next;
  }
  __syncthreads();
  return start;
}

template <class T>
__device__ Sums4 load_sums(const Wkv4<T>& p, const Place4& place, const float* from) {
  Sums4 s;
  if (place.inside) {
    const float* at = from + place.state(p);
    s.a = at[0], s.b = at[p.channels], s.p = at[2 * p.channels];
  }
  return s;
}

// The sums before this thread's first token.
template <class T>
__device__ Sums4 sums_before(const Wkv4<T>& p, const Place4& place, Sums4 (*all)[kChannels], float rate) {
  Sums4 mine;
  for (int64_t t = place.begin; t < place.end; t++) {
    const int64_t at = place.at(p, t);
    mine.add(rate, static_cast<float>(p.k[at]), static_cast<float>(p.v[at]), 1.0f);
  }
  return gather(all, mine, load_sums(p, place, p.state), rate, p.segment, p.tokens, false);
}

template <class T>
__global__ void __launch_bounds__(kChannels* kSegments) wkv4_kernel(const Wkv4<T> p) {
  __shared__ Sums4 all[kSegments][kChannels];
  const Place4 place(p);
  const float rate = place.inside ? expf(p.w[place.channel]) : 0.0f, u = place.inside ? p.u[place.channel] : 0.0f;
  Sums4 s = sums_before(p, place, all, rate);
  for (int64_t t = place.begin; t < place.end; t++) {
    const int64_t at = place.at(p, t);
    const float k = static_cast<float>(p.k[at]), v = static_cast<float>(p.v[at]);
    p.y[at] = static_cast<T>(Read4(s, u, k, v).y);
    s.add(rate, k, v, 1.0f);
  }
  if (place.segment == kSegments - 1 && place.inside) {
    float* at = p.end + place.state(p);
    at[0] = s.a, at[p.channels] = s.b, at[2 * p.channels] = s.p;
  }
}

// One token of the way back; d are the gradients of the sums after it, times e^-(d.p).
template <class T>
struct Step4 {
  Sums4 s;  // before the token
  float k, v, rate;
  Read4 read;
  float gradient;  // of y, over the denominator

  __device__ Step4(const Wkv4<T>& p, int64_t at, int64_t size, float rate_, float u)
      : s(load(p.kept + at, size)),
        k(static_cast<float>(p.k[at])),
        v(static_cast<float>(p.v[at])),
        rate(rate_),
        read(s, u, k, v),
        gradient(static_cast<float>(p.d_y[at]) * read.scale) {}

  __device__ static Sums4 load(const float* kept, int64_t size) {
    Sums4 sums;
    sums.a = kept[0], sums.b = kept[size], sums.p = kept[2 * size];
    return sums;
  }
  __device__ void back(Sums4& d) const { d.add(rate, -read.q, gradient, -gradient * read.y); }
};

// The sums over the segments of a channel, in one fixed order; in segment 0.
__device__ float sum_segments(Sums4 (*all)[kChannels], float x) {
  all[threadIdx.y][threadIdx.x].a = x;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kSegments && threadIdx.y == 0; i++) sum += all[i][threadIdx.x].a;
  __syncthreads();
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kChannels* kSegments) wkv4_backward_kernel(const Wkv4<T> p) {
  __shared__ Sums4 all[kSegments][kChannels];
  __shared__ int newer[kSegments][kChannels];  // does a token of the segment set the exponent?
  const Place4 place(p);
  const int64_t size = static_cast<int64_t>(gridDim.y) * p.tokens * p.channels;
  const float rate = place.inside ? expf(p.w[place.channel]) : 0.0f, u = place.inside ? p.u[place.channel] : 0.0f;
  const Sums4 start = sums_before(p, place, all, rate);
  Sums4 s = start;
  bool sets = false;
  for (int64_t t = place.begin; t < place.end; t++) {
    const int64_t at = place.at(p, t);
    const float k = static_cast<float>(p.k[at]);
    p.kept[at] = s.a, p.kept[at + size] = s.b, p.kept[at + 2 * size] = s.p;
    sets = sets || k >= s.p - rate;
    s.add(rate, k, static_cast<float>(p.v[at]), 1.0f);
  }
  newer[place.segment][threadIdx.x] = sets;
  // The state after the last token: all threads of the channel need it.
  if (place.segment == kSegments - 1) all[0][threadIdx.x] = s;
  __syncthreads();
  const Sums4 last = all[0][threadIdx.x];
  Sums4 d_last = load_sums(p, place, p.d_end);
  float of_p = d_last.p - d_last.a * last.a - d_last.b * last.b;  // the gradient of the exponent as such
  d_last.p = -last.p;
  for (int i = place.segment + 1; i < kSegments; i++) of_p = newer[i][threadIdx.x] ? 0.0f : of_p;
  __syncthreads();

  Sums4 mine;
  for (int64_t t = place.end - 1; t >= place.begin; t--) Step4<T>(p, place.at(p, t), size, rate, u).back(mine);
  Sums4 d = gather(all, mine, d_last, rate, p.segment, p.tokens, true);
  float d_rate = 0.0f, d_u = 0.0f;
  for (int64_t t = place.end - 1; t >= place.begin; t--) {
    const int64_t at = place.at(p, t);
    const Step4<T> step(p, at, size, rate, u);
    const float own = step.read.own * step.gradient, with_own = own * (step.v - step.read.y);
    const float later = expf(step.k + d.p), older = step.s.p - rate;
    const bool newest = step.k >= older;
    d_u += with_own;
    d_rate -= expf(older + d.p) * (d.a * step.s.a + d.b * step.s.b) + (newest ? 0.0f : of_p);
    p.d_k[at] = static_cast<T>(later * (step.v * d.a + d.b) + with_own + (newest ? of_p : 0.0f));
    p.d_v[at] = static_cast<T>(later * d.a + own);
    of_p = newest ? 0.0f : of_p;
    step.back(d);
  }
  d_rate = sum_segments(all, d_rate);
  d_u = sum_segments(all, d_u);
  if (place.segment != 0 || !place.inside) return;
  const float back = expf(d.p + start.p), d_a = d.a * back, d_b = d.b * back;
  float* at = p.d_state + place.state(p);
  at[0] = d_a, at[p.channels] = d_b, at[2 * p.channels] = d_a * start.a + d_b * start.b + of_p;
  p.d_w[place.sequence * p.channels + place.channel] = d_rate * rate;
  p.d_u[place.sequence * p.channels + place.channel] = d_u;
}

dim3 grid_of(const char* op, const Tensor& k) {
  if (k.size(0) > 65535) fail(op, "k has shape " + shape_text(k) + "; B must be at most 65535 on CUDA");
  return dim3(static_cast<unsigned>((k.size(2) + kChannels - 1) / kChannels), static_cast<unsigned>(k.size(0)));
}

int64_t segment_of(int64_t tokens) { return std::max<int64_t>((tokens + kSegments - 1) / kSegments, 4); }

std::tuple<Tensor, Tensor> wkv4_cuda(const Tensor& w, const Tensor& u, const Tensor& k, const Tensor& v,
                                     const Tensor& state) {
  check_wkv4("wkv4", w, u, k, v, state);
  const Launch launch("wkv4", k);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state);
  const Tensor y = empty_tensor(k, k.sizes()), after = empty_tensor(state, state.sizes());
  if (state.numel() == 0) return {y, after};
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv4<T> work{.w = data<float>(ws),
                       .u = data<float>(us),
                       .state = data<float>(before),
                       .k = data<T>(ks),
                       .v = data<T>(vs),
                       .tokens = k.size(1),
                       .channels = k.size(2),
                       .segment = segment_of(k.size(1)),
                       .end = mutable_data<float>(after),
                       .y = mutable_data<T>(y)};
    wkv4_kernel<<<grid_of("wkv4", k), dim3(kChannels, kSegments), 0, launch.stream>>>(work);
    launch.check();
  });
  return {y, after};
}

Wkv4Gradients wkv4_backward_cuda(const Tensor& d_y, const Tensor& d_end, const Tensor& w, const Tensor& u,
                                 const Tensor& k, const Tensor& v, const Tensor& state) {
  check_wkv4_backward("wkv4_backward", d_y, d_end, w, u, k, v, state);
  const Launch launch("wkv4_backward", k);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state), dy = as_contiguous(d_y), end = as_contiguous(d_end);
  const int64_t batch = k.size(0), tokens = k.size(1), channels = k.size(2);
  const Tensor d_w = empty_tensor(state, {batch, channels}), d_u = empty_tensor(state, {batch, channels});
  const Tensor d_k = empty_tensor(k, k.sizes()), d_v = empty_tensor(k, k.sizes());
  const Tensor d_state = empty_tensor(state, state.sizes());
  if (state.numel() == 0) return {d_w, d_u, d_k, d_v, d_state};
  const Tensor kept = empty_tensor(state, {3, batch, tokens, channels});
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv4<T> work{.w = data<float>(ws),
                       .u = data<float>(us),
                       .state = data<float>(before),
                       .k = data<T>(ks),
                       .v = data<T>(vs),
                       .tokens = tokens,
                       .channels = channels,
                       .segment = segment_of(tokens),
                       .d_y = data<T>(dy),
                       .d_end = data<float>(end),
                       .kept = mutable_data<float>(kept),
                       .d_w = mutable_data<float>(d_w),
                       .d_u = mutable_data<float>(d_u),
                       .d_state = mutable_data<float>(d_state),
                       .d_k = mutable_data<T>(d_k),
                       .d_v = mutable_data<T>(d_v)};
    wkv4_backward_kernel<<<grid_of("wkv4_backward", k), dim3(kChannels, kSegments), 0, launch.stream>>>(work);
    launch.check();
  });
  return {d_w, d_u, d_k, d_v, d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv4", TORCH_BOX(&wkv4_cuda));
  m.impl("wkv4_backward", TORCH_BOX(&wkv4_backward_cuda));
}

}  // namespace cog_rwkv

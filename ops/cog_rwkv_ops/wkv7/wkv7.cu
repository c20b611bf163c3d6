// wkv7 and wkv7_: CUDA kernel and launches.
#include <tuple>

#include "../csrc/cuda.cuh"
#include "../csrc/math.h"
#include "../csrc/packed.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"
#include "wkv7.h"

namespace cog_rwkv {
namespace {

constexpr int kThreads = 256;       // four for each of the 64 values, with 16 keys each
constexpr int kInputs = 6 * kHead;  // of one token and head: r, w, k, v, a, b
enum Input { kR, kW, kK, kV, kA, kB };

// Where things lie.
struct Layout {
  const int64_t *rows, *cu_seqlens;  // null: sequence i has row i, and the tokens i * each to (i + 1) * each
  int64_t batch, tokens, heads, pool_rows, in_stride, out_stride, each;
  bool aligned;  // the states allow loads of four at a time
};

// T is the dtype of the activations, S that of the states.
template <class T, class S>
struct Wkv7 : Layout {
  const T* in[6];  // r, w, k, v, a, b, each [tokens, heads, 64]
  T* y;            // [tokens, heads, 64]
  const S* state;  // rows of [heads, 64, 64], in_stride apart
  S* state_out;    // the same rows, out_stride apart
};

// The keys that a thread holds: four at a time, at 16 * j + 4 * quarter.
template <class S>
__device__ __forceinline__ float4 load4(const S* p, bool aligned) {
  const Vector<S, 4> x = aligned ? load_vector<S, 4>(p) : Vector<S, 4>{{p[0], p[1], p[2], p[3]}};
  return make_float4(x.values[0], x.values[1], x.values[2], x.values[3]);
}

template <class S>
__device__ __forceinline__ void store4(S* p, float4 x, bool aligned) {
  const Vector<S, 4> rounded{{static_cast<S>(x.x), static_cast<S>(x.y), static_cast<S>(x.z), static_cast<S>(x.w)}};
  if (aligned) {
    store_vector<S, 4>(p, rounded);
  } else {
    for (int i = 0; i < 4; i++) p[i] = rounded.values[i];
  }
}

__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// s * decay + removed * b + value * k
__device__ __forceinline__ float4 step4(float4 s, float4 decay, float removed, float4 b, float value, float4 k) {
  return make_float4(s.x * decay.x + removed * b.x + value * k.x, s.y * decay.y + removed * b.y + value * k.y,
                     s.z * decay.z + removed * b.z + value * k.z, s.w * decay.w + removed * b.w + value * k.w);
}

// Value i of a token's inputs, as the recurrence wants it.
template <class T, class S>
__device__ __forceinline__ float load_input(const Wkv7<T, S>& p, int64_t token, int64_t head, int i) {
  const float x = static_cast<float>(p.in[i / kHead][(token * p.heads + head) * kHead + i % kHead]);
  return i / kHead == kW ? expf(-0.60653065971263342f * sigmoid(x)) : x;  // e^-0.5
}

template <class T, class S>
__device__ void fill_nan(const Wkv7<T, S>& p, int64_t head, int64_t begin, int64_t end) {
  if (end <= begin) return;
  for (int64_t j = threadIdx.x; j < (end - begin) * kHead; j += kThreads) {
    p.y[((begin + j / kHead) * p.heads + head) * kHead + j % kHead] = static_cast<T>(nanf(""));
  }
}

// NaN for the tokens that are in no sequence: before the first, after the last, and in one that sequence_at refused.
template <class T, class S>
__device__ void fill_gaps(const Wkv7<T, S>& p, int64_t i, int64_t head, bool empty) {
  const int64_t begin = p.cu_seqlens[i], end = p.cu_seqlens[i + 1];
  if (i == 0) fill_nan(p, head, 0, min(begin, p.tokens));
  if (i == p.batch - 1) fill_nan(p, head, max(end, int64_t{0}), p.tokens);
  if (empty) fill_nan(p, head, max(begin, int64_t{0}), min(end, p.tokens));
}

// A block a sequence and head: it walks the tokens with the state in registers. The inputs of the next token are
// fetched while one is computed; two buffers in shared memory, so that one barrier a token is enough.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) wkv7_kernel(const Wkv7<T, S> p) {
  __shared__ __align__(16) float buffers[2][kInputs];
  const int64_t i = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  Sequence s{i * p.each, (i + 1) * p.each, i, true};
  if (p.rows != nullptr) {
    s = sequence_at(p.rows, p.cu_seqlens, i, p.tokens, p.pool_rows);
    fill_gaps(p, i, head, s.begin == s.end);
  }
  const int thread = threadIdx.x, value = thread / 4, quarter = thread % 4;
  if (!s.row_ok) return fill_nan(p, head, s.begin, s.end);
  if (s.begin == s.end && p.state == p.state_out) return;

  const int64_t at = (head * kHead + value) * kHead + quarter * 4;
  float4 state[4];
#pragma unroll
  for (int j = 0; j < 4; j++) state[j] = load4(p.state + s.row * p.in_stride + at + j * 16, p.aligned);

  float next[2] = {0.0f, 0.0f};
  const bool second = thread + kThreads < kInputs;
  if (s.begin < s.end) {
    next[0] = load_input(p, s.begin, head, thread);
    if (second) next[1] = load_input(p, s.begin, head, thread + kThreads);
  }
  for (int64_t t = s.begin; t < s.end; t++) {
    float* in = buffers[(t - s.begin) % 2];
    in[thread] = next[0];
    if (second) in[thread + kThreads] = next[1];
    __syncthreads();
    if (t + 1 < s.end) {
      next[0] = load_input(p, t + 1, head, thread);
      if (second) next[1] = load_input(p, t + 1, head, thread + kThreads);
    }
    const float4* vectors = reinterpret_cast<const float4*>(in) + quarter;
    float removed = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) removed += dot4(state[j], vectors[kA * 16 + j * 4]);
    removed = reduce_lanes<4>(removed, Add{});
    const float v = in[kV * kHead + value];
    float y = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      state[j] =
          step4(state[j], vectors[kW * 16 + j * 4], removed, vectors[kB * 16 + j * 4], v, vectors[kK * 16 + j * 4]);
      y += dot4(state[j], vectors[kR * 16 + j * 4]);
    }
    y = reduce_lanes<4>(y, Add{});
    if (quarter == 0) p.y[(t * p.heads + head) * kHead + value] = static_cast<T>(y);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) store4(p.state_out + s.row * p.out_stride + at + j * 16, state[j], p.aligned);
}

// The inputs, contiguous, as [tokens, heads, 64].
struct Inputs {
  Tensor r, w, k, v, a, b;
};

void wkv7_run(const Launch& launch, const Inputs& in, const Tensor& y, const Tensor& state, const Tensor& state_out,
              Layout layout) {
  const int64_t count = layout.batch * layout.heads;
  if (count == 0) {  // no block would write y, which may have tokens all the same
    const size_t bytes = y.numel() * y.element_size();
    if (bytes > 0) check_cuda("wkv7", cudaMemsetAsync(y.mutable_data_ptr(), 0xff, bytes, launch.stream));  // NaN
    return;
  }
  if (count > INT32_MAX) fail("wkv7", "rows: there are more than 2^31 heads to compute");
  layout.aligned = aligned16(state.const_data_ptr(), state_out.const_data_ptr()) && layout.in_stride % 4 == 0 &&
                   layout.out_stride % 4 == 0;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    dispatch_float_or_half(state.scalar_type(), [&](auto state_type) {
      using T = typename decltype(type)::type;
      using S = typename decltype(state_type)::type;
      const Wkv7<T, S> work{layout,
                            {data<T>(in.r), data<T>(in.w), data<T>(in.k), data<T>(in.v), data<T>(in.a), data<T>(in.b)},
                            mutable_data<T>(y),
                            data<S>(state),
                            mutable_data<S>(state_out)};
      wkv7_kernel<<<static_cast<unsigned>(count), kThreads, 0, launch.stream>>>(work);
      launch.check();
    });
  });
}

std::tuple<Tensor, Tensor> wkv7_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                                     const Tensor& a, const Tensor& b, const Tensor& state) {
  check_wkv7(r, w, k, v, a, b, state);
  const Launch launch("wkv7", r);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor before = as_contiguous(state);
  Tensor y = empty_tensor(r, r.sizes()), after = empty_tensor(state, state.sizes());
  const int64_t batch = r.size(0), each = r.size(1), heads = r.size(2), stride = heads * kHead * kHead;
  wkv7_run(launch, in, y, before, after,
           {.rows = nullptr,
            .cu_seqlens = nullptr,
            .batch = batch,
            .tokens = batch * each,
            .heads = heads,
            .pool_rows = batch,
            .in_stride = stride,
            .out_stride = stride,
            .each = each});
  return {y, after};
}

Tensor wkv7_packed_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                        const Tensor& b, const Tensor& pool, const Tensor& rows, const Tensor& cu_seqlens) {
  const int64_t stride = check_wkv7_packed(r, w, k, v, a, b, pool, rows, cu_seqlens);
  const Launch launch("wkv7_", r);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor row = as_contiguous(rows), start = as_contiguous(cu_seqlens);
  Tensor y = empty_tensor(r, r.sizes());
  wkv7_run(launch, in, y, pool, pool,
           {.rows = data<int64_t>(row),
            .cu_seqlens = data<int64_t>(start),
            .batch = rows.size(0),
            .tokens = r.size(0),
            .heads = pool.size(1),
            .pool_rows = pool.size(0),
            .in_stride = stride,
            .out_stride = stride});
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv7", TORCH_BOX(&wkv7_cuda));
  m.impl("wkv7_", TORCH_BOX(&wkv7_packed_cuda));
}

}  // namespace cog_rwkv

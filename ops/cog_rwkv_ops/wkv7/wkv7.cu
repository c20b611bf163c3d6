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

template <class T>
struct Wkv7 {
  const T* in[6];                    // r, w, k, v, a, b, each [tokens, heads, 64]
  T* y;                              // [tokens, heads, 64]
  const float* state;                // rows of [heads, 64, 64], in_stride apart
  float* state_out;                  // the same rows, out_stride apart
  const int64_t *rows, *cu_seqlens;  // null: sequence i has row i, and the tokens i * each to (i + 1) * each
  int64_t tokens, heads, pool_rows, in_stride, out_stride, each;
  bool aligned;  // the states allow loads of 16 bytes
};

// The keys that a thread holds: four at a time, at 16 * j + 4 * quarter.
__device__ __forceinline__ float4 load4(const float* p, bool aligned) {
  return aligned ? *reinterpret_cast<const float4*>(p) : make_float4(p[0], p[1], p[2], p[3]);
}

__device__ __forceinline__ void store4(float* p, float4 x, bool aligned) {
  if (aligned) {
    *reinterpret_cast<float4*>(p) = x;
  } else {
    p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w;
  }
}

__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// s * decay + removed * b + value * k
__device__ __forceinline__ float4 step4(float4 s, float4 decay, float removed, float4 b, float value, float4 k) {
  return make_float4(s.x * decay.x + removed * b.x + value * k.x, s.y * decay.y + removed * b.y + value * k.y,
                     s.z * decay.z + removed * b.z + value * k.z, s.w * decay.w + removed * b.w + value * k.w);
}

// Value i of a token's inputs, as the recurrence wants it.
template <class T>
__device__ __forceinline__ float load_input(const Wkv7<T>& p, int64_t token, int64_t head, int i) {
  const float x = static_cast<float>(p.in[i / kHead][(token * p.heads + head) * kHead + i % kHead]);
  return i / kHead == kW ? expf(-0.60653065971263342f * sigmoid(x)) : x;  // e^-0.5
}

// A block a sequence and head: it walks the tokens with the state in registers. The inputs of the next token are
// fetched while one is computed; two buffers in shared memory, so that one barrier a token is enough.
template <class T>
__global__ void __launch_bounds__(kThreads) wkv7_kernel(const Wkv7<T> p) {
  __shared__ __align__(16) float buffers[2][kInputs];
  const int64_t i = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  Sequence s{i * p.each, (i + 1) * p.each, i, true};
  if (p.rows != nullptr) s = sequence_at(p.rows, p.cu_seqlens, i, p.tokens, p.pool_rows);
  const int thread = threadIdx.x, value = thread / 4, quarter = thread % 4;
  if (!s.row_ok) {
    for (int64_t j = thread; j < (s.end - s.begin) * kHead; j += kThreads) {
      p.y[((s.begin + j / kHead) * p.heads + head) * kHead + j % kHead] = static_cast<T>(nanf(""));
    }
    return;
  }
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

// `work` has everything but what depends on T.
void wkv7_run(const Launch& launch, const Inputs& in, const Tensor& y, int64_t batch, Wkv7<char> work) {
  const int64_t count = batch * work.heads;
  if (count == 0) return;
  if (count > INT32_MAX) fail("wkv7", "rows: there are more than 2^31 heads to compute");
  work.aligned = aligned16(work.state, work.state_out) && work.in_stride % 4 == 0 && work.out_stride % 4 == 0;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv7<T> typed{{data<T>(in.r), data<T>(in.w), data<T>(in.k), data<T>(in.v), data<T>(in.a), data<T>(in.b)},
                        mutable_data<T>(y),
                        work.state,
                        work.state_out,
                        work.rows,
                        work.cu_seqlens,
                        work.tokens,
                        work.heads,
                        work.pool_rows,
                        work.in_stride,
                        work.out_stride,
                        work.each,
                        work.aligned};
    wkv7_kernel<<<static_cast<unsigned>(count), kThreads, 0, launch.stream>>>(typed);
    launch.check();
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
  wkv7_run(launch, in, y, batch,
           {.state = data<float>(before),
            .state_out = mutable_data<float>(after),
            .rows = nullptr,
            .cu_seqlens = nullptr,
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
  wkv7_run(launch, in, y, rows.size(0),
           {.state = data<float>(pool),
            .state_out = mutable_data<float>(pool),
            .rows = data<int64_t>(row),
            .cu_seqlens = data<int64_t>(start),
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

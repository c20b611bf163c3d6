// norm_shift_: CUDA kernel and launch.
#include "norm_shift.h"

#include "../csrc/cuda.cuh"
#include "../csrc/packed.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

template <class T>
struct NormShift {
  const T *x, *delta;                // [n, c]; delta may be null
  const float *weight, *bias;        // [c]
  const float* mix;                  // [mixes, c]
  float* shift;                      // [pool_rows, c], rows `stride` apart
  const int64_t *rows, *cu_seqlens;  // [batch], [batch + 1]
  T *sum, *out;                      // [n, c], [mixes, n, c]
  int64_t n, c, mixes, stride, batch, pool_rows;
  float eps;

  __device__ __forceinline__ float at(int64_t t, int64_t i) const {
    const float value = static_cast<float>(x[t * c + i]);
    return delta == nullptr ? value : value + static_cast<float>(delta[t * c + i]);
  }
};

// Mean and 1 / standard deviation of a token. Whoever computes them gets the same bits.
struct Moments {
  float mean, scale;
};

template <class T>
__device__ Moments moments(const NormShift<T>& p, int64_t t, float* shared) {
  float total = 0.0f;
  for (int64_t i = threadIdx.x; i < p.c; i += blockDim.x) total += p.at(t, i);
  const float mean = reduce_block(total, Add{}, shared) / static_cast<float>(p.c);
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < p.c; i += blockDim.x) {
    const float d = p.at(t, i) - mean;
    squares += d * d;
  }
  const float variance = reduce_block(squares, Add{}, shared) / static_cast<float>(p.c);
  return {mean, 1.0f / sqrtf(variance + p.eps)};
}

template <class T>
__device__ __forceinline__ float normed(const NormShift<T>& p, const Moments& m, int64_t t, int64_t i) {
  return (p.at(t, i) - m.mean) * m.scale * p.weight[i] + p.bias[i];
}

// A block a token, a thread a channel. Who reads a channel of the state, for the first token of a sequence, also
// writes it, from the last token: so no other block can be too early. A token is normalised again for the next one.
template <class T>
__global__ void __launch_bounds__(256) norm_shift_kernel(const NormShift<T> p) {
  __shared__ float shared[32];
  for (int64_t t = blockIdx.x; t < p.n; t += gridDim.x) {
    const int64_t index = sequence_of(p.cu_seqlens, p.batch, t);
    Sequence s{0, 0, 0, false};
    if (index >= 0) s = sequence_at(p.rows, p.cu_seqlens, index, p.n, p.pool_rows);
    const bool ok = s.row_ok && s.begin <= t && t < s.end, first = ok && t == s.begin;
    const int64_t other = first ? s.end - 1 : ok ? t - 1 : t;  // the sequence's last token, or the one before
    const Moments mine = moments(p, t, shared);
    const Moments others = other == t ? mine : moments(p, other, shared);
    for (int64_t i = threadIdx.x; i < p.c; i += blockDim.x) {
      const float now = normed(p, mine, t, i), theirs = normed(p, others, other, i);
      float before = ok ? theirs : nanf("");
      if (first) {
        float* state = p.shift + s.row * p.stride + i;
        before = *state;
        *state = theirs;
      }
      p.sum[t * p.c + i] = static_cast<T>(p.at(t, i));
      for (int64_t m = 0; m < p.mixes; ++m) {
        p.out[(m * p.n + t) * p.c + i] = static_cast<T>(now + (before - now) * p.mix[m * p.c + i]);
      }
    }
  }
}

std::tuple<Tensor, Tensor> norm_shift_cuda(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
                                           const Tensor& bias, const Tensor& mix, const Tensor& shift,
                                           const Tensor& rows, const Tensor& cu_seqlens, double eps) {
  const int64_t stride = check_norm_shift(x, delta, weight, bias, mix, shift, rows, cu_seqlens);
  const Launch launch("norm_shift_", x);
  const Tensor tokens = as_contiguous(x), added = as_contiguous(delta.value_or(x)), w = as_contiguous(weight),
               b = as_contiguous(bias), mixes = as_contiguous(mix), row = as_contiguous(rows),
               start = as_contiguous(cu_seqlens);
  const int64_t n = x.size(0), c = x.size(1);
  Tensor sum = empty_tensor(x, x.sizes()), out = empty_tensor(x, {mix.size(0), n, c});
  if (n * c == 0) return {sum, out};
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const NormShift<T> work{data<T>(tokens),
                            delta ? data<T>(added) : nullptr,
                            data<float>(w),
                            data<float>(b),
                            data<float>(mixes),
                            mutable_data<float>(shift),
                            data<int64_t>(row),
                            data<int64_t>(start),
                            mutable_data<T>(sum),
                            mutable_data<T>(out),
                            n,
                            c,
                            mix.size(0),
                            stride,
                            rows.size(0),
                            shift.size(0),
                            static_cast<float>(eps)};
    norm_shift_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(work);
    launch.check();
  });
  return {sum, out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("norm_shift_", TORCH_BOX(&norm_shift_cuda)); }

}  // namespace cog_rwkv

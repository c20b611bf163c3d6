// layer_norm: CUDA kernel and launch.
#include "layer_norm.h"

#include "../csrc/cuda.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// A block a row.
template <class T>
__global__ void __launch_bounds__(256)
    layer_norm_kernel(const T* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                      T* __restrict__ out, int64_t n_size, int64_t c_size, float eps) {
  __shared__ float shared[32];
  for (int64_t n = blockIdx.x; n < n_size; n += gridDim.x) {
    const T* row = x + n * c_size;
    float total = 0.0f;
    for (int64_t c = threadIdx.x; c < c_size; c += blockDim.x) total += static_cast<float>(row[c]);
    const float mean = reduce_block(total, Add{}, shared) / static_cast<float>(c_size);
    float squares = 0.0f;
    for (int64_t c = threadIdx.x; c < c_size; c += blockDim.x) {
      const float d = static_cast<float>(row[c]) - mean;
      squares += d * d;
    }
    const float variance = reduce_block(squares, Add{}, shared) / static_cast<float>(c_size);
    const float scale = 1.0f / sqrtf(variance + eps);
    for (int64_t c = threadIdx.x; c < c_size; c += blockDim.x) {
      const float y = (static_cast<float>(row[c]) - mean) * scale * weight[c] + bias[c];
      out[n * c_size + c] = static_cast<T>(y);
    }
  }
}

Tensor layer_norm_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check_layer_norm(x, weight, bias);
  const Launch launch("layer_norm", x);
  const Tensor rows = as_contiguous(x), w = as_contiguous(weight), b = as_contiguous(bias);
  const int64_t n = x.size(0), c = x.size(1);
  Tensor out = empty_tensor(x, x.sizes());
  if (n * c == 0) return out;
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    layer_norm_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(data<T>(rows), data<float>(w), data<float>(b),
                                                               mutable_data<T>(out), n, c, static_cast<float>(eps));
    launch.check();
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("layer_norm", TORCH_BOX(&layer_norm_cuda)); }

}  // namespace cog_rwkv

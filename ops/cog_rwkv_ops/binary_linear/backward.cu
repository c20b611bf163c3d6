// binary_linear_backward: CUDA kernels and launches. Both products are PyTorch's (cuBLAS), of signs, which any dtype
// holds exactly; their sums are float32.
#include "binary_linear.h"

#include <tuple>

#include "../csrc/matmul.cuh"

namespace cog_rwkv {
namespace {

// A block a row.
template <class T>
__global__ void __launch_bounds__(256)
    mean_kernel(const T* __restrict__ weight, int64_t m, int64_t k, float* __restrict__ scale) {
  __shared__ float shared[32];
  for (int64_t r = blockIdx.x; r < m; r += gridDim.x) {
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < k; c += 256) sum += fabsf(static_cast<float>(weight[r * k + c]));
    sum = reduce_block(sum, Add{}, shared);
    if (threadIdx.x == 0) scale[r] = sum / static_cast<float>(k);
  }
}

template <class T, class S>
__global__ void __launch_bounds__(256) sign_kernel(const T* __restrict__ values, int64_t size, S* __restrict__ out) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < size; i += gridDim.x * int64_t{256}) {
    out[i] = static_cast<S>(static_cast<float>(values[i]) >= 0.0f ? 1.0f : -1.0f);
  }
}

// out[r, c] = gradient[r, c] * scale[c]
template <class T>
__global__ void __launch_bounds__(256) scale_kernel(const T* __restrict__ gradient, const float* __restrict__ scale,
                                                    int64_t n, int64_t m, float* __restrict__ out) {
  for (int64_t r = blockIdx.y; r < n; r += gridDim.y) {
    for (int64_t c = blockIdx.x * int64_t{256} + threadIdx.x; c < m; c += gridDim.x * int64_t{256}) {
      out[r * m + c] = static_cast<float>(gradient[r * m + c]) * scale[c];
    }
  }
}

// A block a row: the product, times the factor of the row, where |x| <= 1.
template <class T>
__global__ void __launch_bounds__(256) pass_kernel(const float* __restrict__ product, const float* __restrict__ factor,
                                                   const T* __restrict__ x, int64_t n, int64_t k, T* __restrict__ out) {
  for (int64_t r = blockIdx.x; r < n; r += gridDim.x) {
    const float f = factor == nullptr ? 1.0f : factor[r];
    for (int64_t i = r * k + threadIdx.x; i < (r + 1) * k; i += 256) {
      const auto value = static_cast<float>(x[i]);
      out[i] = static_cast<T>(value >= -1.0f && value <= 1.0f ? product[i] * f : 0.0f);
    }
  }
}

// A block a row of the weight.
template <class W>
__global__ void __launch_bounds__(256)
    weight_kernel(const float* __restrict__ product, const float* __restrict__ scale, const W* __restrict__ weight,
                  int64_t m, int64_t k, W* __restrict__ out) {
  __shared__ float shared[32];
  for (int64_t r = blockIdx.x; r < m; r += gridDim.x) {
    float dot = 0.0f;
    for (int64_t i = r * k + threadIdx.x; i < (r + 1) * k; i += 256) {
      dot += static_cast<float>(weight[i]) >= 0.0f ? product[i] : -product[i];
    }
    const float by_scale = reduce_block(dot, Add{}, shared) / static_cast<float>(k);
    for (int64_t i = r * k + threadIdx.x; i < (r + 1) * k; i += 256) {
      out[i] = static_cast<W>(weight_gradient(product[i], by_scale, scale[r], static_cast<float>(weight[i])));
    }
  }
}

template <class T>
Tensor signs_of(const Launch& launch, const Tensor& values, ScalarType type) {
  const int64_t rows = values.size(0), columns = values.size(1);
  Tensor out = torch::stable::new_empty(values, {rows, columns}, type);
  dispatch_float_or_half(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    sign_kernel<<<blocks(rows * columns, 256), 256, 0, launch.stream>>>(data<T>(values), rows * columns,
                                                                        mutable_data<S>(out));
    launch.check();
  });
  return out;
}

template <class T, class W>
void backward(const Launch& launch, const Tensor& gradient, const Tensor& x, const Tensor& weight, const Tensor& for_x,
              const Tensor& for_weight) {
  constexpr const char* op = "binary_linear_backward";
  const int64_t n = x.size(0), k = x.size(1), m = weight.size(0);
  const ScalarType type = x.scalar_type();
  const Tensor scale = empty_floats(x, {m}), scaled = empty_floats(x, {n, m});
  if (m > 0) {
    mean_kernel<<<blocks(m, 1), 256, 0, launch.stream>>>(data<W>(weight), m, k, mutable_data<float>(scale));
    launch.check();
  }
  if (n * m > 0) {
    const dim3 grid(blocks(m, 256), static_cast<unsigned>(std::min<int64_t>(n, 65535)));
    scale_kernel<<<grid, 256, 0, launch.stream>>>(data<T>(gradient), data<float>(scale), n, m,
                                                  mutable_data<float>(scaled));
    launch.check();
  }
  if (n > 0) {
    const Tensor matrix = signs_of<W>(launch, weight, type);
    const Rows product_x = multiply(launch, op, Rows{scaled, std::nullopt}, matrix, Identity{});
    pass_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(data<float>(product_x.values), product_x.factors(), data<T>(x),
                                                         n, k, mutable_data<T>(for_x));
    launch.check();
  }
  if (m > 0) {
    const Tensor product_w =
        product(launch, op, torch::stable::transpose(gradient, 0, 1), signs_of<T>(launch, x, type));
    weight_kernel<<<blocks(m, 1), 256, 0, launch.stream>>>(data<float>(product_w), data<float>(scale), data<W>(weight),
                                                           m, k, mutable_data<W>(for_weight));
    launch.check();
  }
}

std::tuple<Tensor, Tensor> binary_linear_backward_cuda(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  check_binary_linear_backward(gradient, x, weight);
  const Launch launch("binary_linear_backward", x);
  const Tensor given = as_contiguous(gradient), rows = as_contiguous(x), matrix = as_contiguous(weight);
  const int64_t n = x.size(0), k = x.size(1), m = weight.size(0);
  Tensor for_x = empty_tensor(x, {n, k}), for_weight = empty_tensor(weight, {m, k});
  if (k == 0) return {for_x, for_weight};
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    dispatch_float_or_half(weight.scalar_type(), [&](auto weight_type) {
      using T = typename decltype(type)::type;
      using W = typename decltype(weight_type)::type;
      backward<T, W>(launch, given, rows, matrix, for_x, for_weight);
    });
  });
  return {for_x, for_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("binary_linear_backward", TORCH_BOX(&binary_linear_backward_cuda));
}

}  // namespace cog_rwkv

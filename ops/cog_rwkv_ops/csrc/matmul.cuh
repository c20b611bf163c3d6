// Products of float32 activations with 16-bit or float32 weights: what `linear`, `low_rank` and
// `squared_relu_linear` share. The product itself is PyTorch's (cuBLAS), with float32 sums and a float32 result.
//
// Float16 weights want float16 activations, which end at 65504 and lose bits below 6e-5. So a row whose largest
// magnitude is far from 1 is multiplied by a power of two when it is rounded, and its result divided by it again.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <type_traits>

#include "cuda.cuh"
#include "math.h"
#include "reduce.cuh"
#include "tensor.h"

namespace cog_rwkv {

struct Identity {
  __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct Tanh {
  __device__ __forceinline__ float operator()(float x) const { return tanhf(x); }
};
struct Sigmoid {
  __device__ __forceinline__ float operator()(float x) const { return sigmoid(x); }
};
struct SquaredRelu {
  template <class A>
  __device__ __forceinline__ A operator()(A x) const {
    return x <= 0 ? A{0} : x * x;  // NaN stays
  }
};

// The power of two by which a row is multiplied, from its largest magnitude. Zero, infinity and NaN ask for none.
__device__ __forceinline__ float row_scale(float largest) {
  if (!(largest > 0.0f) || isinf(largest)) return 1.0f;
  if (largest <= 0x1p15f && largest >= 0x1p-3f) return 1.0f;
  const int exponent = max(ilogbf(largest), -100);
  return ldexpf(1.0f, 11 - exponent);  // the largest comes to lie between 2^11 and 2^12
}

// out[n][k] = f(x[n][k] * factor[n]) * scale in W. inverse[n] = 1 / scale; without `inverse` scale is 1.
template <class T, class W, class F>
__global__ void __launch_bounds__(256)
    round_rows_kernel(const T* __restrict__ x, const float* __restrict__ factor, W* __restrict__ out,
                      float* __restrict__ inverse, int64_t n_size, int64_t k_size, F f) {
  __shared__ float shared[32];
  for (int64_t n = blockIdx.x; n < n_size; n += gridDim.x) {
    const T* row = x + n * k_size;
    const float before = factor == nullptr ? 1.0f : factor[n];
    float scale = 1.0f;
    if (inverse != nullptr) {
      float largest = 0.0f;
      for (int64_t k = threadIdx.x; k < k_size; k += blockDim.x) {
        largest = fmaxf(largest, fabsf(f(static_cast<float>(row[k]) * before)));
      }
      scale = row_scale(reduce_block(largest, Max{}, shared));
      if (threadIdx.x == 0) inverse[n] = 1.0f / scale;
    }
    for (int64_t k = threadIdx.x; k < k_size; k += blockDim.x) {
      out[n * k_size + k] = static_cast<W>(f(static_cast<float>(row[k]) * before) * scale);
    }
  }
}

// out[n][m] = product[n][m] * factor[n] + bias[m]; `out` may be `product`.
template <class T>
__global__ void __launch_bounds__(256)
    finish_rows_kernel(const float* product, const float* __restrict__ factor, const float* __restrict__ bias, T* out,
                       int64_t n_size, int64_t m_size) {
  const int64_t step = gridDim.x * int64_t{256};
  for (int64_t n = blockIdx.y; n < n_size; n += gridDim.y) {
    const float scale = factor == nullptr ? 1.0f : factor[n];
    for (int64_t m = blockIdx.x * int64_t{256} + threadIdx.x; m < m_size; m += step) {
      const float y = product[n * m_size + m] * scale;
      out[n * m_size + m] = static_cast<T>(bias == nullptr ? y : y + bias[m]);
    }
  }
}

// Activations, and by what their rows are still to be multiplied (nothing where there is no factor).
struct Rows {
  Tensor values;
  std::optional<Tensor> factor;

  const float* factors() const { return factor ? data<float>(*factor) : nullptr; }
};

inline Tensor empty_floats(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return torch::stable::new_empty(like, sizes, ScalarType::Float);
}

// f(rows) in the dtype `type`.
template <class F>
Rows round_rows(const Launch& launch, const Rows& rows, ScalarType type, F f) {
  const int64_t n = rows.values.size(0), k = rows.values.size(1);
  Rows out{torch::stable::new_empty(rows.values, {n, k}, type), std::nullopt};
  if (type == ScalarType::Half) out.factor = empty_floats(rows.values, {n});
  if (n == 0) return out;
  float* inverse = out.factor ? mutable_data<float>(*out.factor) : nullptr;
  dispatch_float_or_half(rows.values.scalar_type(), [&](auto from) {
    dispatch_float_or_half(type, [&](auto to) {
      using T = typename decltype(from)::type;
      using W = typename decltype(to)::type;
      round_rows_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(data<T>(rows.values), rows.factors(),
                                                                 mutable_data<W>(out.values), inverse, n, k, f);
      launch.check();
    });
  });
  return out;
}

// a b, [n, k] times [k, m], in float32.
inline Tensor product(const Launch& launch, const char* op, const Tensor& a, const Tensor& b) {
  if (a.size(0) == 0 || a.size(1) == 0 || b.size(1) == 0) {
    Tensor zeros = empty_floats(a, {a.size(0), b.size(1)});
    const size_t bytes = zeros.numel() * sizeof(float);
    if (bytes > 0) check_cuda(op, cudaMemsetAsync(mutable_data<float>(zeros), 0, bytes, launch.stream));
    return zeros;
  }
  using torch::stable::detail::from;
  const bool plain = a.scalar_type() == ScalarType::Float;
  std::array<StableIValue, 3> stack{from(a), from(b), plain ? StableIValue{0} : from(ScalarType::Float)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mm", plain ? "" : "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// f(rows) times `matrix` [k, m], in float32, still to be multiplied by the factors.
template <class F>
Rows multiply(const Launch& launch, const char* op, const Rows& rows, const Tensor& matrix, F f) {
  const ScalarType type = matrix.scalar_type();
  const bool as_it_is = std::is_same_v<F, Identity> && !rows.factor && rows.values.scalar_type() == type;
  const Rows given = as_it_is ? rows : round_rows(launch, rows, type, f);
  return {product(launch, op, given.values, matrix), given.factor};
}

// rows * factor + bias in the dtype `type`.
inline Tensor finish_rows(const Launch& launch, const Rows& rows, const std::optional<Tensor>& bias, ScalarType type) {
  if (!rows.factor && !bias && type == ScalarType::Float) return rows.values;
  const int64_t n = rows.values.size(0), m = rows.values.size(1);
  Tensor out = type == ScalarType::Float ? rows.values : torch::stable::new_empty(rows.values, {n, m}, type);
  if (n * m == 0) return out;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((m + 255) / 256, 1 << 20)),
                  static_cast<unsigned>(std::min<int64_t>(n, 65535)));
  dispatch_float_or_half(type, [&](auto to) {
    using T = typename decltype(to)::type;
    finish_rows_kernel<<<grid, 256, 0, launch.stream>>>(
        data<float>(rows.values), rows.factors(), bias ? data<float>(*bias) : nullptr, mutable_data<T>(out), n, m);
    launch.check();
  });
  return out;
}

}  // namespace cog_rwkv

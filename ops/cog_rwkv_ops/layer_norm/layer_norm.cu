// layer_norm: CUDA kernel and launch.
#include "layer_norm.h"

#include "../csrc/cuda.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// A block a row, of any length.
template <class T>
__global__ void __launch_bounds__(256)
    long_rows_kernel(const T* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
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

constexpr int kFours = 2, kMostThreads = 512;

// A block a row that its threads hold in registers, kFours times four channels each: memory is read once, at once.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    held_rows_kernel(const T* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                     T* __restrict__ out, int64_t n_size, int c_size, float eps) {
  __shared__ float shared[32];
  for (int64_t n = blockIdx.x; n < n_size; n += gridDim.x) {
    Vector<T, 4> row[kFours];
    Vector<float, 4> w[kFours], b[kFours];
    const auto channel = [&](int j) { return 4 * static_cast<int>(threadIdx.x + j * blockDim.x); };
#pragma unroll
    for (int j = 0; j < kFours; j++) {
      if (channel(j) >= c_size) continue;
      row[j] = load_vector<T, 4>(x + n * c_size + channel(j));
      w[j] = load_vector<float, 4>(weight + channel(j)), b[j] = load_vector<float, 4>(bias + channel(j));
    }
    const auto each = [&](auto f) {
#pragma unroll
      for (int j = 0; j < kFours; j++) {
        if (channel(j) >= c_size) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) f(j, i, static_cast<float>(row[j].values[i]));
      }
    };
    float total = 0.0f, squares = 0.0f;
    each([&](int, int, float v) { total += v; });
    const float mean = reduce_block(total, Add{}, shared) / static_cast<float>(c_size);
    each([&](int, int, float v) { squares += (v - mean) * (v - mean); });
    const float variance = reduce_block(squares, Add{}, shared) / static_cast<float>(c_size);
    const float scale = 1.0f / sqrtf(variance + eps);
    each([&](int j, int i, float v) {
      row[j].values[i] = static_cast<T>((v - mean) * scale * w[j].values[i] + b[j].values[i]);
    });
#pragma unroll
    for (int j = 0; j < kFours; j++) {
      if (channel(j) < c_size) store_vector(out + n * c_size + channel(j), row[j]);
    }
  }
}

template <class T>
void launch_layer_norm(const Launch& launch, const T* x, const float* weight, const float* bias, T* out, int64_t n,
                       int64_t c, float eps) {
  if (c % 4 == 0 && c <= 4 * kFours * kMostThreads && aligned16(x, weight, bias, out)) {
    const auto threads = static_cast<unsigned>((c / 4 + 32 * kFours - 1) / (32 * kFours) * 32);
    held_rows_kernel<<<blocks(n, 1), threads, 0, launch.stream>>>(x, weight, bias, out, n, static_cast<int>(c), eps);
  } else {
    long_rows_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(x, weight, bias, out, n, c, eps);
  }
  launch.check();
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
    launch_layer_norm<T>(launch, data<T>(rows), data<float>(w), data<float>(b), mutable_data<T>(out), n, c,
                         static_cast<float>(eps));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("layer_norm", TORCH_BOX(&layer_norm_cuda)); }

}  // namespace cog_rwkv

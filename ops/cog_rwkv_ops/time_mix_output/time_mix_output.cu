// time_mix_output: CUDA kernel and launch.
#include "time_mix_output.h"

#include "../csrc/cuda.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"
#include "args.h"

namespace cog_rwkv {
namespace {

// A warp a head of a token, two channels a lane: l and l + 32.
template <class T>
__global__ void __launch_bounds__(256) time_mix_output_kernel(const OutputArgs<T> p, int64_t count, int64_t heads) {
  const int lane = threadIdx.x % 32;
  const int64_t step = gridDim.x * int64_t{8};
  for (int64_t head = blockIdx.x * int64_t{8} + threadIdx.x / 32; head < count; head += step) {
    const int64_t at = head * 64 + lane, c = head % heads * 64 + lane;
    float y[2], total = 0.0f, bonus = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int64_t i = at + j * 32;
      y[j] = static_cast<float>(p.y[i]);
      total += y[j];
      bonus += static_cast<float>(p.r[i]) * static_cast<float>(p.k[i]) * p.r_k[c + j * 32];
    }
    const float mean = reduce_lanes(total, Add{}) * (1.0f / 64);
    bonus = reduce_lanes(bonus, Add{});
#pragma unroll
    for (int j = 0; j < 2; j++) {
      y[j] -= mean;
      squares += y[j] * y[j];
    }
    const float scale = 1.0f / sqrtf(reduce_lanes(squares, Add{}) * (1.0f / 64) + p.eps);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int64_t i = at + j * 32;
      const float normal = y[j] * scale * p.weight[c + j * 32] + p.bias[c + j * 32];
      p.out[i] = static_cast<T>((normal + bonus * static_cast<float>(p.v[i])) * static_cast<float>(p.g[i]));
    }
  }
}

Tensor time_mix_output_cuda(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g,
                            const Tensor& r_k, const Tensor& weight, const Tensor& bias, double eps) {
  check_time_mix_output(y, r, k, v, g, r_k, weight, bias);
  const Launch launch("time_mix_output", y);
  const Tensor state = as_contiguous(y), receptance = as_contiguous(r), key = as_contiguous(k);
  const Tensor value = as_contiguous(v), gate = as_contiguous(g), bonus = as_contiguous(r_k);
  const Tensor scale = as_contiguous(weight), shift = as_contiguous(bias);
  Tensor out = empty_tensor(y, y.sizes());
  const int64_t heads = y.size(1) / 64, count = y.size(0) * heads;
  if (count == 0) return out;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const OutputArgs<T> args{data<T>(state),       data<T>(receptance),    data<T>(key),       data<T>(value),
                             data<T>(gate),        data<float>(bonus),     data<float>(scale), data<float>(shift),
                             mutable_data<T>(out), static_cast<float>(eps)};
    time_mix_output_kernel<<<blocks(count, 8), 256, 0, launch.stream>>>(args, count, heads);
    launch.check();
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("time_mix_output", TORCH_BOX(&time_mix_output_cuda)); }

}  // namespace cog_rwkv

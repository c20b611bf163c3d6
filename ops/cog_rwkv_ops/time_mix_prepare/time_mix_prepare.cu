// time_mix_prepare: CUDA kernel and launch.
#include "time_mix_prepare.h"

#include <tuple>

#include "../csrc/cuda.cuh"
#include "../csrc/math.h"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"
#include "args.h"

namespace cog_rwkv {
namespace {

// A warp a head of a token, two channels a lane: l and l + 32.
template <class T>
__global__ void __launch_bounds__(256) time_mix_prepare_kernel(const PrepareArgs<T> p, int64_t count, int64_t heads) {
  const int lane = threadIdx.x % 32;
  const int64_t step = gridDim.x * int64_t{8};
  for (int64_t head = blockIdx.x * int64_t{8} + threadIdx.x / 32; head < count; head += step) {
    float a[2], kk[2], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int64_t i = head * 64 + j * 32 + lane, c = head % heads * 64 + j * 32 + lane;
      const float k = static_cast<float>(p.k[i]);
      a[j] = sigmoid(static_cast<float>(p.a[i]));
      kk[j] = k * p.k_k[c];
      squares += kk[j] * kk[j];
      p.k_out[i] = static_cast<T>(k * (1.0f + (a[j] - 1.0f) * p.k_a[c]));
      float v = static_cast<float>(p.v[i]);
      if (p.v_first != nullptr) {
        v += (static_cast<float>(p.v_first[i]) - v) * sigmoid(static_cast<float>(p.v_mix[i]));
      }
      p.v_out[i] = static_cast<T>(v);
    }
    const float norm = sqrtf(reduce_lanes(squares, Add{}));
    const float scale = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int64_t i = head * 64 + j * 32 + lane;
      p.minus_kk[i] = static_cast<T>(-(kk[j] * scale));
      p.kk_a[i] = static_cast<T>(kk[j] * scale * a[j]);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> time_mix_prepare_cuda(const Tensor& k, const Tensor& v, const Tensor& a,
                                                                 const Tensor& k_k, const Tensor& k_a,
                                                                 const std::optional<Tensor>& v_first,
                                                                 const std::optional<Tensor>& v_mix) {
  check_time_mix_prepare(k, v, a, k_k, k_a, v_first, v_mix);
  const Launch launch("time_mix_prepare", k);
  const Tensor key = as_contiguous(k), value = as_contiguous(v), rate = as_contiguous(a);
  const Tensor first = as_contiguous(v_first.value_or(v)), mix = as_contiguous(v_mix.value_or(v));
  const Tensor key_scale = as_contiguous(k_k), key_rate = as_contiguous(k_a);
  Tensor k_out = empty_tensor(k, k.sizes()), v_out = empty_tensor(k, k.sizes());
  Tensor minus_kk = empty_tensor(k, k.sizes()), kk_a = empty_tensor(k, k.sizes());
  const int64_t heads = k.size(1) / 64, count = k.size(0) * heads;
  if (count == 0) return {k_out, v_out, minus_kk, kk_a};
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const PrepareArgs<T> args{data<T>(key),
                              data<T>(value),
                              data<T>(rate),
                              v_first ? data<T>(first) : nullptr,
                              v_mix ? data<T>(mix) : nullptr,
                              data<float>(key_scale),
                              data<float>(key_rate),
                              mutable_data<T>(k_out),
                              mutable_data<T>(v_out),
                              mutable_data<T>(minus_kk),
                              mutable_data<T>(kk_a)};
    time_mix_prepare_kernel<<<blocks(count, 8), 256, 0, launch.stream>>>(args, count, heads);
    launch.check();
  });
  return {k_out, v_out, minus_kk, kk_a};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("time_mix_prepare", TORCH_BOX(&time_mix_prepare_cuda)); }

}  // namespace cog_rwkv

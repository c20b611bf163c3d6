// time_mix_output: CUDA kernel and launch.
#include "time_mix_output.h"

#include "../csrc/aligned.cuh"
#include "../csrc/chain.cuh"
#include "../csrc/eights.cuh"
#include "../csrc/reduce.cuh"
#include "args.h"

namespace cog_rwkv {
namespace {

// Launched in a chain: forward_ has it between kernels that follow each other closely.
template <class T>
__global__ void __launch_bounds__(kEightsThreads, kEightsBlocks)
    time_mix_output_kernel(const OutputArgs<T> p, int64_t tokens, uint32_t channels) {
  Eights place(tokens * channels / 8, channels);
  wait_for_previous();
  let_next_begin();
  float r_k[8], weight[8], bias[8];
  load_eight(r_k, p.r_k + place.channel), load_eight(weight, p.weight + place.channel);
  load_eight(bias, p.bias + place.channel);
  for (; place.any(); place.next()) {
    const int64_t i = place.at * 8;
    float y[8] = {}, v[8] = {}, g[8] = {}, total = 0.0f, bonus = 0.0f, squares = 0.0f;
    if (place.inside()) {
      float r[8], k[8];
      load_eight(y, p.y + i), load_eight(r, p.r + i), load_eight(k, p.k + i), load_eight(v, p.v + i);
      load_eight(g, p.g + i);
#pragma unroll
      for (int j = 0; j < 8; j++) total += y[j], bonus += r[j] * k[j] * r_k[j];
    }
    const float mean = reduce_lanes<8>(total, Add{}) * (1.0f / 64);
    bonus = reduce_lanes<8>(bonus, Add{});
#pragma unroll
    for (int j = 0; j < 8; j++) {
      y[j] -= mean;
      squares += y[j] * y[j];
    }
    const float scale = 1.0f / sqrtf(reduce_lanes<8>(squares, Add{}) * (1.0f / 64) + p.eps);
    if (!place.inside()) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = (y[j] * scale * weight[j] + bias[j] + bonus * v[j]) * g[j];
    store_eight(p.out + i, y);
  }
}

}  // namespace

Tensor time_mix_output_cuda(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g,
                            const Tensor& r_k, const Tensor& weight, const Tensor& bias, double eps) {
  check_time_mix_output(y, r, k, v, g, r_k, weight, bias);
  const Launch launch("time_mix_output", y);
  const Tensor state = as_aligned(y), receptance = as_aligned(r), key = as_aligned(k);
  const Tensor value = as_aligned(v), gate = as_aligned(g), bonus = as_aligned(r_k);
  const Tensor scale = as_aligned(weight), shift = as_aligned(bias);
  Tensor out = empty_tensor(y, y.sizes());
  const int64_t tokens = y.size(0), channels = y.size(1);
  if (tokens * channels == 0) return out;
  const int multiprocessors = device_attribute("time_mix_output", cudaDevAttrMultiProcessorCount);
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const OutputArgs<T> args{data<T>(state),       data<T>(receptance),    data<T>(key),       data<T>(value),
                             data<T>(gate),        data<float>(bonus),     data<float>(scale), data<float>(shift),
                             mutable_data<T>(out), static_cast<float>(eps)};
    launch_chained("time_mix_output", launch.stream, time_mix_output_kernel<T>,
                   dim3(eights_blocks(tokens, channels, multiprocessors)), dim3(kEightsThreads), 0, args, tokens,
                   static_cast<uint32_t>(channels));
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("time_mix_output", TORCH_BOX(&time_mix_output_cuda)); }

}  // namespace cog_rwkv

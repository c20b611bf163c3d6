// wkv4 and wkv4_backward: schemas and CPU kernels.
#include "wkv4.h"

#define COG_RWKV_KERNELS "../wkv4/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/floats.h"

namespace cog_rwkv {
namespace {

constexpr int64_t kLanes = 16;  // channels of a V

// f(sequence, channel, how many) for all channels, up to 16 at a time.
template <class F>
void each_lanes(int64_t batch, int64_t channels, F f) {
  const int64_t parts = (channels + kLanes - 1) / kLanes;
  parallel_for(batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t channel = i % parts * kLanes;
      f(i / parts, channel, std::min(kLanes, channels - channel));
    }
  });
}

std::tuple<Tensor, Tensor> wkv4_cpu(const Tensor& w, const Tensor& u, const Tensor& k, const Tensor& v,
                                    const Tensor& state) {
  check_wkv4("wkv4", w, u, k, v, state);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state);
  const Tensor y = empty_tensor(k, k.sizes()), after = empty_tensor(state, state.sizes());
  const int64_t tokens = k.size(1), channels = k.size(2);
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = COG_RWKV_KERNEL(wkv4_channels<T>);
    each_lanes(k.size(0), channels, [&](int64_t sequence, int64_t channel, int64_t left) {
      const int64_t at = sequence * tokens * channels + channel, state_at = sequence * 3 * channels + channel;
      kernel(data<float>(ws) + channel, data<float>(us) + channel, data<T>(ks) + at, data<T>(vs) + at,
             data<float>(before) + state_at, mutable_data<float>(after) + state_at, mutable_data<T>(y) + at, tokens,
             channels, left);
    });
  });
  return {y, after};
}

Wkv4Gradients wkv4_backward_cpu(const Tensor& d_y, const Tensor& d_end, const Tensor& w, const Tensor& u,
                                const Tensor& k, const Tensor& v, const Tensor& state) {
  check_wkv4_backward("wkv4_backward", d_y, d_end, w, u, k, v, state);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state), dy = as_contiguous(d_y), end = as_contiguous(d_end);
  const int64_t batch = k.size(0), tokens = k.size(1), channels = k.size(2);
  const Tensor d_w = empty_tensor(state, {batch, channels}), d_u = empty_tensor(state, {batch, channels});
  const Tensor d_k = empty_tensor(k, k.sizes()), d_v = empty_tensor(k, k.sizes());
  const Tensor d_state = empty_tensor(state, state.sizes());
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = COG_RWKV_KERNEL(wkv4_channels_backward<T>);
    each_lanes(batch, channels, [&](int64_t sequence, int64_t channel, int64_t left) {
      const int64_t at = sequence * tokens * channels + channel, state_at = sequence * 3 * channels + channel;
      const int64_t part = sequence * channels + channel;
      const auto kept = scratch(tokens * 3 * kLanes);
      kernel(data<float>(ws) + channel, data<float>(us) + channel, data<T>(ks) + at, data<T>(vs) + at,
             data<float>(before) + state_at, data<T>(dy) + at, data<float>(end) + state_at,
             mutable_data<float>(d_w) + part, mutable_data<float>(d_u) + part, mutable_data<T>(d_k) + at,
             mutable_data<T>(d_v) + at, mutable_data<float>(d_state) + state_at, kept.get(), tokens, channels, left);
    });
  });
  return {d_w, d_u, d_k, d_v, d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("wkv4(Tensor w, Tensor u, Tensor k, Tensor v, Tensor state) -> (Tensor, Tensor)");
  m.def(
      "wkv4_backward(Tensor d_y, Tensor d_end, Tensor w, Tensor u, Tensor k, Tensor v, Tensor state) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("wkv4", TORCH_BOX(&wkv4_cpu));
  m.impl("wkv4_backward", TORCH_BOX(&wkv4_backward_cpu));
}

}  // namespace cog_rwkv

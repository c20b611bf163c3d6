// depthwise_conv1d and its gradients: schemas and CPU kernels.
#include "depthwise_conv1d.h"

#include <algorithm>
#include <vector>

#include "../csrc/cpu.h"
#include "../csrc/dtype.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

template <class T>
void widen(const Line<T>& line, float* out) {
  for (int64_t i = 0; i < line.size; i++) out[i] = line.at(i);
}

// sum[t] += filter[t - u] * input[u] for all u <= t, in the order of u.
COG_RWKV_INLINE void convolve(const float* __restrict filter, const float* __restrict input, int64_t time,
                              float* __restrict sum) {
  for (int64_t u = 0; u < time; u++) {
    for (int64_t t = u; t < time; t++) sum[t] += filter[t - u] * input[u];
  }
}

int64_t grain(int64_t time) { return 1 + 65536 / (time * time + 1); }

// [B, C, T] from a filter [C, T] and an input [B, C, T].
Tensor filtered(const Tensor& w, const Tensor& input, const Conv& p) {
  const Tensor filters = as_contiguous(w), inputs = as_contiguous(input);
  Tensor out = empty_tensor(input, {p.batch, p.channels, p.time});
  dispatch_float_or_half(input.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T *filter = data<T>(filters), *from = data<T>(inputs);
    T* to = mutable_data<T>(out);
    parallel_for(p.batch * p.channels, grain(p.time), [&](int64_t begin, int64_t end) {
      std::vector<float> a(p.time), b(p.time), sum(p.time);
      best_cpu([&] {
        for (int64_t row = begin; row < end; row++) {
          widen(Line<T>{filter + row % p.channels * p.time, p.time, true}, a.data());
          widen(Line<T>{from + row * p.time, p.time, p.input_reversed}, b.data());
          std::fill(sum.begin(), sum.end(), 0.0f);
          convolve(a.data(), b.data(), p.time, sum.data());
          for (int64_t t = 0; t < p.time; t++) {
            to[row * p.time + (p.out_reversed ? p.time - 1 - t : t)] = static_cast<T>(sum[t] + p.eps);
          }
        }
      });
    });
  });
  return out;
}

// [C, T], summed over the batch in its order.
Tensor correlated(const Tensor& gradient, const Tensor& k) {
  const Tensor gradients = as_contiguous(gradient), signals = as_contiguous(k);
  const int64_t batch = k.size(0), channels = k.size(1), time = k.size(2);
  Tensor out = empty_tensor(k, {channels, time});
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T *g = data<T>(gradients), *signal = data<T>(signals);
    T* to = mutable_data<T>(out);
    parallel_for(channels, grain(time), [&](int64_t begin, int64_t end) {
      std::vector<float> a(time), b(time), sum(time);
      best_cpu([&] {
        for (int64_t c = begin; c < end; c++) {
          std::fill(sum.begin(), sum.end(), 0.0f);
          for (int64_t row = c; row < batch * channels; row += channels) {
            widen(Line<T>{signal + row * time, time, false}, a.data());
            widen(Line<T>{g + row * time, time, true}, b.data());
            convolve(a.data(), b.data(), time, sum.data());
          }
          for (int64_t t = 0; t < time; t++) to[c * time + t] = static_cast<T>(sum[t]);
        }
      });
    });
  });
  return out;
}

Tensor depthwise_conv1d_cpu(const Tensor& w, const Tensor& k, double eps) {
  check_signal("depthwise_conv1d", "k", k);
  check_filter("depthwise_conv1d", w, "k", k);
  return filtered(w, k, {k.size(0), k.size(1), k.size(2), false, false, static_cast<float>(eps)});
}

Tensor depthwise_conv1d_backward_k_cpu(const Tensor& gradient, const Tensor& w) {
  check_signal("depthwise_conv1d_backward_k", "gradient", gradient);
  check_filter("depthwise_conv1d_backward_k", w, "gradient", gradient);
  return filtered(w, gradient, {gradient.size(0), gradient.size(1), gradient.size(2), true, true, 0.0f});
}

Tensor depthwise_conv1d_backward_w_cpu(const Tensor& gradient, const Tensor& k) {
  check_signal("depthwise_conv1d_backward_w", "k", k);
  check_like("depthwise_conv1d_backward_w", "gradient", gradient, "k", k);
  return correlated(gradient, k);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("depthwise_conv1d(Tensor w, Tensor k, float eps=0.0) -> Tensor");
  m.def("depthwise_conv1d_backward_k(Tensor gradient, Tensor w) -> Tensor");
  m.def("depthwise_conv1d_backward_w(Tensor gradient, Tensor k) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("depthwise_conv1d", TORCH_BOX(&depthwise_conv1d_cpu));
  m.impl("depthwise_conv1d_backward_k", TORCH_BOX(&depthwise_conv1d_backward_k_cpu));
  m.impl("depthwise_conv1d_backward_w", TORCH_BOX(&depthwise_conv1d_backward_w_cpu));
}

}  // namespace cog_rwkv

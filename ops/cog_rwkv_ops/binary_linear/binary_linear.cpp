// binary_linear, binary_linear_packed and pack_signs: schemas and CPU kernels.
#include "binary_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "../csrc/cpu.h"
#include "../csrc/dtype.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// The signs of `k` values, as many words as sign_words(k) says.
template <class T>
void pack_row(const T* values, int64_t k, uint32_t* words) {
  for (int64_t w = 0; w < sign_words(k); w++) {
    const int64_t begin = w * 32, count = std::clamp<int64_t>(k - begin, 0, 32);
    uint32_t word = 0;
    for (int64_t i = 0; i < count; i++) word |= uint32_t{static_cast<float>(values[begin + i]) >= 0.0f} << i;
    words[w] = word;
  }
}

// In float64, in the order of the values: one rounding, whatever K is.
template <class T>
float mean_magnitude(const T* values, int64_t k) {
  double sum = 0.0;
  for (int64_t i = 0; i < k; i++) sum += std::fabs(static_cast<float>(values[i]));
  return k == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(k));
}

std::tuple<Tensor, Tensor> pack(const Tensor& weight) {
  const Tensor matrix = as_contiguous(weight);
  const int64_t m = weight.size(0), k = weight.size(1), width = sign_words(k);
  Tensor signs = torch::stable::new_empty(weight, {m, width}, ScalarType::Int);
  Tensor scale = torch::stable::new_empty(weight, {m}, ScalarType::Float);
  auto* words = static_cast<uint32_t*>(signs.mutable_data_ptr());
  auto* means = mutable_data<float>(scale);
  dispatch_float_or_half(weight.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = data<T>(matrix);
    parallel_for(m, 1 + 16384 / (k + 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        pack_row(from + r * k, k, words + r * width);
        means[r] = mean_magnitude(from + r * k, k);
      }
    });
  });
  return {signs, scale};
}

// How many of the bits differ. The sum is of integers, so its order is free.
COG_RWKV_INLINE int64_t differing(const uint32_t* a, const uint32_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t w = 0; w < words; w += 2) {
    uint64_t p, q;
    std::memcpy(&p, a + w, 8);
    std::memcpy(&q, b + w, 8);
    count += __builtin_popcountll(p ^ q);
  }
  return count;
}

Tensor product(const Tensor& x, const Tensor& signs, const Tensor& scale) {
  const Tensor rows = as_contiguous(x), matrix = as_contiguous(signs), factor = as_contiguous(scale);
  const int64_t n = x.size(0), k = x.size(1), m = signs.size(0), width = sign_words(k);
  Tensor out = empty_tensor(x, {n, m});
  const auto* weight = static_cast<const uint32_t*>(matrix.const_data_ptr());
  const auto* scales = data<float>(factor);
  std::vector<uint32_t> packed(n * width);
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = data<T>(rows);
    T* to = mutable_data<T>(out);
    parallel_for(n, 1 + 16384 / (k + 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) pack_row(from + r * k, k, packed.data() + r * width);
    });
    parallel_for(m, 1 + 16384 / (n * width + 1), [&](int64_t begin, int64_t end) {
      best_cpu([&] {
        for (int64_t c = begin; c < end; c++) {
          for (int64_t r = 0; r < n; r++) {
            const int64_t sum = k - 2 * differing(packed.data() + r * width, weight + c * width, width);
            to[r * m + c] = static_cast<T>(static_cast<float>(sum) * scales[c]);
          }
        }
      });
    });
  });
  return out;
}

// Rows begin to end of out[r] = sum over i of factor(r, i) * sign(rows[i]), in the order of i; finish(r, sums) takes
// them.
template <class T, class Factor, class Finish>
void sums_of_signs(int64_t begin, int64_t end, const T* rows, int64_t count, int64_t k, const Factor& factor,
                   const Finish& finish) {
  std::vector<float> sums(k);
  for (int64_t r = begin; r < end; r++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const float f = factor(r, i);
      const T* row = rows + i * k;
      float* to = sums.data();
      best_cpu([&] {
        for (int64_t c = 0; c < k; c++) to[c] += static_cast<float>(row[c]) >= 0.0f ? f : -f;
      });
    }
    finish(r, sums.data());
  }
}

template <class T, class W>
void backward(const T* gradient, const T* x, const W* weight, T* for_x, W* for_weight, int64_t n, int64_t k,
              int64_t m) {
  std::vector<float> scale(m);
  for (int64_t r = 0; r < m; r++) scale[r] = mean_magnitude(weight + r * k, k);
  parallel_for(n, 1 + 32768 / (m * k + 1), [&](int64_t begin, int64_t end) {
    const auto factor = [&](int64_t r, int64_t i) { return static_cast<float>(gradient[r * m + i]) * scale[i]; };
    sums_of_signs(begin, end, weight, m, k, factor, [&](int64_t r, const float* sums) {
      for (int64_t c = 0; c < k; c++) {
        const auto value = static_cast<float>(x[r * k + c]);
        for_x[r * k + c] = static_cast<T>(value >= -1.0f && value <= 1.0f ? sums[c] : 0.0f);
      }
    });
  });
  parallel_for(m, 1 + 32768 / (n * k + 1), [&](int64_t begin, int64_t end) {
    const auto factor = [&](int64_t r, int64_t i) { return static_cast<float>(gradient[i * m + r]); };
    sums_of_signs(begin, end, x, n, k, factor, [&](int64_t r, const float* sums) {
      const W* row = weight + r * k;
      double dot = 0.0;
      for (int64_t c = 0; c < k; c++) dot += static_cast<float>(row[c]) >= 0.0f ? sums[c] : -sums[c];
      const auto by_scale = static_cast<float>(dot / static_cast<double>(k));
      for (int64_t c = 0; c < k; c++) {
        for_weight[r * k + c] =
            static_cast<W>(weight_gradient(sums[c], by_scale, scale[r], static_cast<float>(row[c])));
      }
    });
  });
}

std::tuple<Tensor, Tensor> binary_linear_backward_cpu(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  check_binary_linear_backward(gradient, x, weight);
  const Tensor given = as_contiguous(gradient), rows = as_contiguous(x), matrix = as_contiguous(weight);
  const int64_t n = x.size(0), k = x.size(1), m = weight.size(0);
  Tensor for_x = empty_tensor(x, {n, k}), for_weight = empty_tensor(weight, {m, k});
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    dispatch_float_or_half(weight.scalar_type(), [&](auto weight_type) {
      using T = typename decltype(type)::type;
      using W = typename decltype(weight_type)::type;
      backward(data<T>(given), data<T>(rows), data<W>(matrix), mutable_data<T>(for_x), mutable_data<W>(for_weight), n,
               k, m);
    });
  });
  return {for_x, for_weight};
}

std::tuple<Tensor, Tensor> pack_signs_cpu(const Tensor& weight) {
  check_matrix("pack_signs", "weight", weight, "[M, K]");
  return pack(weight);
}

Tensor binary_linear_cpu(const Tensor& x, const Tensor& weight) {
  check_binary_linear(x, weight);
  const auto [signs, scale] = pack(weight);
  return product(x, signs, scale);
}

Tensor binary_linear_packed_cpu(const Tensor& x, const Tensor& signs, const Tensor& scale) {
  check_binary_linear_packed(x, signs, scale);
  return product(x, signs, scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("pack_signs(Tensor weight) -> (Tensor, Tensor)");
  m.def("binary_linear(Tensor x, Tensor weight) -> Tensor");
  m.def("binary_linear_backward(Tensor gradient, Tensor x, Tensor weight) -> (Tensor, Tensor)");
  m.def("binary_linear_packed(Tensor x, Tensor signs, Tensor scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs_cpu));
  m.impl("binary_linear", TORCH_BOX(&binary_linear_cpu));
  m.impl("binary_linear_backward", TORCH_BOX(&binary_linear_backward_cpu));
  m.impl("binary_linear_packed", TORCH_BOX(&binary_linear_packed_cpu));
}

}  // namespace cog_rwkv

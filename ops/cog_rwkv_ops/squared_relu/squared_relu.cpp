// squared_relu and squared_relu_linear: schemas and CPU kernels.
#include "squared_relu.h"

#include <cstdint>

namespace cog_rwkv {

// Which neurons of a few tokens are not zero (see kernel.h).
struct ActiveNeurons {
  const int32_t* index;
  const float* value;
  const int32_t* start;
  int64_t count;
};

}  // namespace cog_rwkv

#define COG_RWKV_KERNELS "../squared_relu/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/elementwise.h"
#include "../csrc/floats.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor squared_relu_cpu(const Tensor& x) {
  check_floating("squared_relu", "x", x);
  const Tensor values = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto square = [](auto v) { return v <= 0 ? decltype(v){0} : v * v; };  // NaN stays
    elementwise_cpu(mutable_data<T>(out), x.numel(), square, data<T>(values));
  });
  return out;
}

// The active neurons of up to 256 tokens, T at a time.
template <int T>
class ActiveLists {
 public:
  ActiveLists(const float* k, int64_t tokens, int64_t f_size)
      : blocks_((tokens + T - 1) / T),
        index_(new int32_t[blocks_ * (f_size + 1)]),
        start_(new int32_t[blocks_ * (chunks(f_size) + 1)]),
        value_(new float[blocks_ * (f_size + 1) * T]),
        lists_(new ActiveNeurons[blocks_]) {
    const auto kernel = COG_RWKV_KERNEL(active_neurons<T>);
    parallel_for(blocks_, 1 + 16384 / (f_size + 1), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; b++) {
        int32_t* index = index_.get() + b * (f_size + 1);
        int32_t* start = start_.get() + b * (chunks(f_size) + 1);
        float* value = value_.get() + b * (f_size + 1) * T;
        kernel(k + b * T * f_size, f_size, tokens - b * T, index, value, start);
        lists_[b] = {index, value, start, start[chunks(f_size)]};
      }
    });
  }
  const ActiveNeurons* get() const { return lists_.get(); }
  int64_t blocks() const { return blocks_; }

 private:
  static int64_t chunks(int64_t f_size) { return (f_size + 127) / 128; }
  int64_t blocks_;
  std::unique_ptr<int32_t[]> index_, start_;
  std::unique_ptr<float[]> value_;
  std::unique_ptr<ActiveNeurons[]> lists_;
};

// total [tokens, c] = relu(k)^2 weight_t, for up to 256 tokens, T at a time; threads share the columns.
template <int T, class W>
void squared_relu_matmul(const float* k, const W* weight_t, float* total, int64_t tokens, int64_t f, int64_t c) {
  const ActiveLists<T> active(k, tokens, f);
  const auto kernel = COG_RWKV_KERNEL(squared_relu_rows<T, W>);
  const int64_t units = (c + 15) / 16, products = 16 * (f / 8 + 1) * tokens;
  parallel_for(units, 1 + 40000 / products, [&](int64_t begin, int64_t end) {
    kernel(active.get(), active.blocks(), tokens, weight_t, f, c, begin * 16, std::min(c, end * 16), total);
  });
}

Tensor squared_relu_linear_cpu(const Tensor& k, const Tensor& weight_t) {
  check_squared_relu_linear(k, weight_t);
  const Tensor rows = as_contiguous(k), matrix = as_contiguous(weight_t);
  const int64_t n = k.size(0), f = k.size(1), c = weight_t.size(1);
  Tensor out = empty_tensor(k, {n, c});
  if (n * c == 0) return out;
  const Floats floats(rows);
  FloatsOut totals(out);
  dispatch_float_or_half(weight_t.scalar_type(), [&](auto weight_type) {
    using W = typename decltype(weight_type)::type;
    for (int64_t begin = 0; begin < n; begin += 256) {
      const int64_t tokens = std::min<int64_t>(256, n - begin);
      const auto run = tokens == 1   ? squared_relu_matmul<1, W>
                       : tokens == 2 ? squared_relu_matmul<2, W>
                                     : squared_relu_matmul<4, W>;
      run(floats.get() + begin * f, data<W>(matrix), totals.get() + begin * c, tokens, f, c);
    }
  });
  totals.write();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("squared_relu_linear(Tensor k, Tensor weight_t) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("squared_relu", TORCH_BOX(&squared_relu_cpu));
  m.impl("squared_relu_linear", TORCH_BOX(&squared_relu_linear_cpu));
}

}  // namespace cog_rwkv

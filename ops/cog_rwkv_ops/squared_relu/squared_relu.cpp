// squared_relu and squared_relu_linear: schemas and CPU kernels.
#include "squared_relu.h"

#include "active.h"

#define COG_RWKV_KERNELS "../squared_relu/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/elementwise.h"
#include "../csrc/floats.h"
#include "../csrc/tensor.h"
#include "work.h"

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

Tensor squared_relu_linear_cpu(const Tensor& k, const Tensor& weight_t) {
  check_squared_relu_linear(k, weight_t);
  const Tensor rows = as_contiguous(k), matrix = as_contiguous(weight_t);
  const int64_t n = k.size(0), f = k.size(1), c = weight_t.size(1);
  Tensor out = empty_tensor(k, {n, c});
  if (n * c == 0) return out;
  const Floats floats(rows);
  FloatsOut totals(out);
  for (int64_t begin = 0; begin < n; begin += SquaredReluWork::kTokens) {
    const int64_t tokens = std::min(SquaredReluWork::kTokens, n - begin);
    SquaredReluWork work(matrix, tokens);
    const float* from = floats.get() + begin * f;
    float* to = totals.get() + begin * c;
    parallel_for(work.blocks(), 1 + 16384 / (f + 1), [&](int64_t b0, int64_t b1) { work.find_active(from, b0, b1); });
    const int64_t products = 16 * (f / 8 + 1) * tokens;
    parallel_for(work.columns(), 1 + 40000 / products, [&](int64_t c0, int64_t c1) { work.multiply(to, c0, c1); });
  }
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

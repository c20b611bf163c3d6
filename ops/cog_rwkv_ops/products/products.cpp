// products_ and active_rows_: schemas and CPU kernels.
#include "products.h"

#include <cmath>

#include "../csrc/floats.h"
#include "../csrc/math.h"
#include "../csrc/matmul.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// In place; `f` as in csrc/products.cuh.
void apply(int64_t f, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (f == 1) y[i] = std::tanh(y[i]);
    if (f == 2) y[i] = sigmoid(y[i]);
    if (f == 3) y[i] = y[i] <= 0.0f ? 0.0f : y[i] * y[i];
  }
}

void products_cpu(const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
                  const std::vector<std::optional<Tensor>>& biases, const std::vector<int64_t>& activations,
                  const std::vector<Tensor>& out) {
  check_products({x, weights, biases, activations, out});
  const int64_t n = x[0].size(0);
  std::vector<Floats> rows;
  std::vector<FloatsOut> sums;
  std::vector<MatmulJob> jobs;
  for (size_t i = 0; i < x.size(); i++) {
    const int64_t m = weights[i].size(0), k = weights[i].size(1);
    rows.emplace_back(x[i]);
    sums.emplace_back(out[i]);
    const float* bias = biases[i] ? data<float>(*biases[i]) : nullptr;
    jobs.push_back({{rows.back().get(), bias, sums.back().get(), n, m, k, Activation::none},
                    torch::stable::contiguous(weights[i])});
  }
  matmul(jobs);
  for (size_t i = 0; i < x.size(); i++) {
    apply(activations[i], sums[i].get(), out[i].numel());
    sums[i].write();
  }
}

void active_rows_cpu(const Tensor& act, const Tensor& value_t, const Tensor& out) {
  check_active_rows(act, value_t, out);
  const Tensor value = torch::stable::contiguous(torch::stable::transpose(value_t, 0, 1));
  const Floats rows(act);
  float* to = mutable_data<float>(out);
  matmul({{{rows.get(), nullptr, to, act.size(0), value_t.size(1), act.size(1), Activation::none}, value}});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("products_(Tensor[] x, Tensor[] weights, Tensor?[] biases, int[] activations, Tensor(a!)[] out) -> ()");
  m.def("active_rows_(Tensor act, Tensor value_t, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("products_", TORCH_BOX(&products_cpu));
  m.impl("active_rows_", TORCH_BOX(&active_rows_cpu));
}

}  // namespace cog_rwkv

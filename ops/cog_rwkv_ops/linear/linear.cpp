// linear: schema and CPU kernel.
#include "linear.h"
#include "../csrc/floats.h"
#include "../csrc/matmul.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor linear_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear(x, weight, bias);
  const Tensor rows = as_contiguous(x), matrix = as_contiguous(weight);
  const Tensor vector = bias ? as_contiguous(*bias) : matrix;  // read only where there is a bias
  const int64_t n = x.size(0), k = x.size(1), m = weight.size(0);
  Tensor out = empty_tensor(x, {n, m});
  const Floats floats(rows);
  FloatsOut result(out);
  const float* offset = bias ? data<float>(vector) : nullptr;
  matmul({{{floats.get(), offset, result.get(), n, m, k, Activation::none}, matrix}});
  result.write();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) { m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("linear", TORCH_BOX(&linear_cpu)); }

}  // namespace cog_rwkv

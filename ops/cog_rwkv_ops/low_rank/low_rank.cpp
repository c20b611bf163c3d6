// low_rank: schema and CPU kernel.
#include "low_rank.h"

#include "../csrc/floats.h"
#include "../csrc/matmul.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor low_rank_cpu(const Tensor& x, const Tensor& down, const Tensor& up, const std::optional<Tensor>& bias,
                    StringHandle activation) {
  const Activation between = activation_named(activation);
  check_low_rank(x, down, up, bias);
  const Tensor rows = as_contiguous(x), first = as_contiguous(down), second = as_contiguous(up);
  const Tensor vector = bias ? as_contiguous(*bias) : second;  // read only where there is a bias
  const int64_t n = x.size(0), c = x.size(1), d = down.size(0), m = up.size(0);
  Tensor out = empty_tensor(x, {n, m});
  const Floats floats(rows);
  FloatsOut result(out);
  const auto hidden = scratch(n * d);
  const float* offset = bias ? data<float>(vector) : nullptr;
  matmul({{{floats.get(), nullptr, hidden.get(), n, d, c, between}, first}});
  matmul({{{hidden.get(), offset, result.get(), n, m, d, Activation::none}, second}});
  result.write();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("low_rank(Tensor x, Tensor down, Tensor up, Tensor? bias=None, str activation=\"none\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("low_rank", TORCH_BOX(&low_rank_cpu)); }

}  // namespace cog_rwkv

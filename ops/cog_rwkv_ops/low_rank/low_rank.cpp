// low_rank: schema and CPU kernel.
#include "low_rank.h"

#define COG_RWKV_KERNELS "../low_rank/kernel.h"
#include "../csrc/matmul.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

void activate(Activation activation, float* values, int64_t size) {
  if (activation == Activation::none) return;
  const auto kernel =
      activation == Activation::tanh ? COG_RWKV_KERNEL(activate_tanh) : COG_RWKV_KERNEL(activate_sigmoid);
  parallel_for(size, 4096, [&](int64_t begin, int64_t end) { kernel(values + begin, end - begin); });
}

Tensor low_rank_cpu(const Tensor& x, const Tensor& down, const Tensor& up, const std::optional<Tensor>& bias,
                    const std::string& activation) {
  check_low_rank(x, down, up, bias);
  const Activation between = activation_named(activation);
  const Tensor rows = as_contiguous(x), first = as_contiguous(down), second = as_contiguous(up);
  const Tensor vector = bias ? as_contiguous(*bias) : second;  // read only where there is a bias
  const int64_t n = x.size(0), c = x.size(1), d = down.size(0), m = up.size(0);
  Tensor out = empty_tensor(x, {n, m});
  const Floats floats(rows);
  FloatsOut result(out);
  const auto hidden = scratch(n * d);
  const MatmulArgs in{floats.get(), nullptr, hidden.get(), n, d, c};
  const MatmulArgs back{hidden.get(), bias ? data<float>(vector) : nullptr, result.get(), n, m, d};
  dispatch_float_or_half(down.scalar_type(), [&](auto type) {
    using W = typename decltype(type)::type;
    matmul(in, data<W>(first));
    activate(between, hidden.get(), n * d);
    matmul(back, data<W>(second));
  });
  result.write();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("low_rank(Tensor x, Tensor down, Tensor up, Tensor? bias=None, str activation=\"none\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("low_rank", TORCH_BOX(&low_rank_cpu)); }

}  // namespace cog_rwkv

// add: schema and CPU kernel.
#include "../csrc/elementwise.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor add_cpu(const Tensor& a, const Tensor& b) {
  check_floating("add", "a", a);
  check_like("add", "b", b, "a", a);
  const Tensor x = as_contiguous(a), y = as_contiguous(b);
  Tensor out = empty_tensor(a, a.sizes());
  dispatch_floating(a.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto sum = [](auto p, auto q) { return p + q; };
    elementwise_cpu(mutable_data<T>(out), a.numel(), sum, data<T>(x), data<T>(y));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) { m.def("add(Tensor a, Tensor b) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("add", TORCH_BOX(&add_cpu)); }

}  // namespace cog_rwkv

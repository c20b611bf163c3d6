// swish and swish_backward: schemas and CPU kernels.
#include "swish.h"

#include "../csrc/elementwise.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor swish_cpu(const Tensor& x) {
  check_floating("swish", "x", x);
  const Tensor in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cpu(mutable_data<T>(out), x.numel(), Swish<T>{}, data<T>(in));
  });
  return out;
}

Tensor swish_backward_cpu(const Tensor& gradient, const Tensor& x) {
  check_floating("swish_backward", "x", x);
  check_like("swish_backward", "gradient", gradient, "x", x);
  const Tensor grad = as_contiguous(gradient), in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cpu(mutable_data<T>(out), x.numel(), SwishBackward<T>{}, data<T>(grad), data<T>(in));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("swish(Tensor x) -> Tensor");
  m.def("swish_backward(Tensor gradient, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("swish", TORCH_BOX(&swish_cpu));
  m.impl("swish_backward", TORCH_BOX(&swish_backward_cpu));
}

}  // namespace cog_rwkv

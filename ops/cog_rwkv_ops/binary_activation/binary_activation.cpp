// binary_activation and binary_activation_backward: schemas and CPU kernels.
#include "binary_activation.h"

#include "../csrc/elementwise.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor binary_activation_cpu(const Tensor& x) {
  check_floating("binary_activation", "x", x);
  const Tensor in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cpu(mutable_data<T>(out), x.numel(), BinaryActivation{}, data<T>(in));
  });
  return out;
}

Tensor binary_activation_backward_cpu(const Tensor& gradient, const Tensor& x) {
  check_floating("binary_activation_backward", "x", x);
  check_like("binary_activation_backward", "gradient", gradient, "x", x);
  const Tensor grad = as_contiguous(gradient), in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cpu(mutable_data<T>(out), x.numel(), BinaryActivationBackward{}, data<T>(grad), data<T>(in));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("binary_activation(Tensor x) -> Tensor");
  m.def("binary_activation_backward(Tensor gradient, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("binary_activation", TORCH_BOX(&binary_activation_cpu));
  m.impl("binary_activation_backward", TORCH_BOX(&binary_activation_backward_cpu));
}

}  // namespace cog_rwkv

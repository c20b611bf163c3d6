// binary_activation and binary_activation_backward: CUDA kernels and launches.
#include "binary_activation.h"

#include "../csrc/elementwise.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor binary_activation_cuda(const Tensor& x) {
  check_floating("binary_activation", "x", x);
  const Launch launch("binary_activation", x);
  const Tensor in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), x.numel(), BinaryActivation{}, data<T>(in));
  });
  return out;
}

Tensor binary_activation_backward_cuda(const Tensor& gradient, const Tensor& x) {
  check_floating("binary_activation_backward", "x", x);
  check_like("binary_activation_backward", "gradient", gradient, "x", x);
  const Launch launch("binary_activation_backward", x);
  const Tensor grad = as_contiguous(gradient), in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), x.numel(), BinaryActivationBackward{}, data<T>(grad), data<T>(in));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("binary_activation", TORCH_BOX(&binary_activation_cuda));
  m.impl("binary_activation_backward", TORCH_BOX(&binary_activation_backward_cuda));
}

}  // namespace cog_rwkv

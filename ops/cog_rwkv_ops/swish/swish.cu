// swish and swish_backward: CUDA kernels and launches.
#include "swish.h"

#include "../csrc/elementwise.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor swish_cuda(const Tensor& x) {
  check_floating("swish", "x", x);
  const Launch launch("swish", x);
  const Tensor in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), x.numel(), Swish<T>{}, data<T>(in));
  });
  return out;
}

Tensor swish_backward_cuda(const Tensor& gradient, const Tensor& x) {
  check_floating("swish_backward", "x", x);
  check_like("swish_backward", "gradient", gradient, "x", x);
  const Launch launch("swish_backward", x);
  const Tensor grad = as_contiguous(gradient), in = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), x.numel(), SwishBackward<T>{}, data<T>(grad), data<T>(in));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("swish", TORCH_BOX(&swish_cuda));
  m.impl("swish_backward", TORCH_BOX(&swish_backward_cuda));
}

}  // namespace cog_rwkv

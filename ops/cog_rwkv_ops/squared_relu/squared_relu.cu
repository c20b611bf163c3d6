// squared_relu and squared_relu_linear: CUDA kernels and launches.
#include "squared_relu.h"

#include "../csrc/elementwise.cuh"
#include "../csrc/matmul.cuh"

namespace cog_rwkv {
namespace {

Tensor squared_relu_cuda(const Tensor& x) {
  check_floating("squared_relu", "x", x);
  const Launch launch("squared_relu", x);
  const Tensor values = as_contiguous(x);
  Tensor out = empty_tensor(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), x.numel(), SquaredRelu{}, data<T>(values));
  });
  return out;
}

Tensor squared_relu_linear_cuda(const Tensor& k, const Tensor& weight_t) {
  check_squared_relu_linear(k, weight_t);
  const Launch launch("squared_relu_linear", k);
  const Rows rows{as_contiguous(k), std::nullopt};
  const Rows out = multiply(launch, "squared_relu_linear", rows, as_contiguous(weight_t), SquaredRelu{});
  return finish_rows(launch, out, std::nullopt, k.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("squared_relu", TORCH_BOX(&squared_relu_cuda));
  m.impl("squared_relu_linear", TORCH_BOX(&squared_relu_linear_cuda));
}

}  // namespace cog_rwkv

// linear: CUDA kernels and launches.
#include "linear.h"

#include "../csrc/matmul.cuh"

namespace cog_rwkv {
namespace {

Tensor linear_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear(x, weight, bias);
  const Launch launch("linear", x);
  const Tensor matrix = torch::stable::transpose(as_contiguous(weight), 0, 1);
  const Rows out = multiply(launch, "linear", Rows{as_contiguous(x), std::nullopt}, matrix, Identity{});
  return finish_rows(launch, out, as_contiguous(bias), x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("linear", TORCH_BOX(&linear_cuda)); }

}  // namespace cog_rwkv

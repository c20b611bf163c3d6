// low_rank: CUDA kernels and launches.
#include "low_rank.h"

#include "../csrc/matmul.cuh"

namespace cog_rwkv {
namespace {

Rows second_product(const Launch& launch, const Rows& hidden, const Tensor& matrix, Activation activation) {
  if (activation == Activation::tanh) return multiply(launch, "low_rank", hidden, matrix, Tanh{});
  if (activation == Activation::sigmoid) return multiply(launch, "low_rank", hidden, matrix, Sigmoid{});
  return multiply(launch, "low_rank", hidden, matrix, Identity{});
}

Tensor low_rank_cuda(const Tensor& x, const Tensor& down, const Tensor& up, const std::optional<Tensor>& bias,
                     StringHandle activation) {
  const Activation between = activation_named(activation);
  check_low_rank(x, down, up, bias);
  const Launch launch("low_rank", x);
  const Tensor first = torch::stable::transpose(as_contiguous(down), 0, 1);
  const Tensor second = torch::stable::transpose(as_contiguous(up), 0, 1);
  const Rows hidden = multiply(launch, "low_rank", Rows{as_contiguous(x), std::nullopt}, first, Identity{});
  const Rows out = second_product(launch, hidden, second, between);
  return finish_rows(launch, out, as_contiguous(bias), x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("low_rank", TORCH_BOX(&low_rank_cuda)); }

}  // namespace cog_rwkv

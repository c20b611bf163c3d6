// New tensors and contiguous ones, through the stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace cog_rwkv {

using torch::stable::Tensor;

// `t` itself where it is contiguous, else a copy that is. (Asked here first: a call into PyTorch costs more.)
inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// Uninitialised, contiguous, with the dtype and device of `like`. (empty_like would copy its strides.)
inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return torch::stable::new_empty(like, sizes);
}

}  // namespace cog_rwkv

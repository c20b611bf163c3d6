// New tensors and contiguous ones, through the stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace cog_rwkv {

using torch::stable::Tensor;

// `t` itself where it is contiguous, else a copy that is. (Asked here first: a call into PyTorch costs more.)
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// The same of one that may be left out.
inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(as_contiguous(*t)) : std::nullopt;
}

// Uninitialised, contiguous, with the dtype and device of `like`. (empty_like would copy its strides. The C function
// behind torch::stable::new_empty: that one looks the operator up by its name at every call, for a microsecond.)
inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  AtenTensorHandle result = nullptr;
  const auto count = static_cast<int64_t>(sizes.size());
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_aten_new_empty(like.get(), sizes.data(), count, nullptr, nullptr, nullptr, 0, nullptr, &result));
  return Tensor(result);
}

}  // namespace cog_rwkv

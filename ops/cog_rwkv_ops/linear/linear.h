// linear: the checks of its arguments, the same on every device.
#pragma once

#include <optional>

#include "../csrc/packed_weight.h"

namespace cog_rwkv {

inline void check_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  constexpr const char* op = "linear";
  check_float_or_half(op, "x", x);
  check_dim(op, "x", x, 2, "[N, K]");
  check_weight(op, "weight", weight, x, x.size(1), "[M, K] with K as in x");
  if (!bias) return;
  check_dtype(op, "bias", *bias, {ScalarType::Float});
  check_device(op, "bias", *bias, "x", x);
  check_shape(op, "bias", *bias, {weight.size(0)}, "[M] with M as in weight");
}

}  // namespace cog_rwkv

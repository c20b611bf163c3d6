// layer_norm: the checks of its arguments, the same on every device.
#pragma once

#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  constexpr const char* op = "layer_norm";
  check_float_or_half(op, "x", x);
  check_dim(op, "x", x, 2, "[N, C]");
  check_vector(op, "weight", weight, x);
  check_vector(op, "bias", bias, x);
}

}  // namespace cog_rwkv

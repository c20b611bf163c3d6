// squared_relu and squared_relu_linear: the checks of their arguments, the same on every device.
#pragma once

#include "../csrc/check.h"

namespace cog_rwkv {

inline void check_squared_relu_linear(const Tensor& k, const Tensor& weight_t) {
  constexpr const char* op = "squared_relu_linear";
  check_float_or_half(op, "k", k);
  check_dim(op, "k", k, 2, "[N, F]");
  check_float_or_half(op, "weight_t", weight_t);
  check_device(op, "weight_t", weight_t, "k", k);
  check_dim(op, "weight_t", weight_t, 2, "[F, C]");
  check_shape(op, "weight_t", weight_t, {k.size(1), weight_t.size(1)}, "[F, C] with F as in k");
}

}  // namespace cog_rwkv

// low_rank: the checks of its arguments, the same on every device.
#pragma once

#include <optional>
#include <string>

#include "../csrc/matmul.h"
#include "../csrc/text.h"

namespace cog_rwkv {

inline Activation activation_named(StringHandle text) {
  const std::string name = take_string(text);
  if (name == "none") return Activation::none;
  if (name == "tanh") return Activation::tanh;
  if (name == "sigmoid") return Activation::sigmoid;
  fail("low_rank", "activation is \"" + name + "\"; it must be \"none\", \"tanh\" or \"sigmoid\"");
}

inline void check_low_rank(const Tensor& x, const Tensor& down, const Tensor& up, const std::optional<Tensor>& bias) {
  constexpr const char* op = "low_rank";
  check_float_or_half(op, "x", x);
  check_dim(op, "x", x, 2, "[N, C]");
  check_float_or_half(op, "down", down);
  check_device(op, "down", down, "x", x);
  check_dim(op, "down", down, 2, "[D, C]");
  check_shape(op, "down", down, {down.size(0), x.size(1)}, "[D, C] with C as in x");
  check_same_dtype(op, "up", up, "down", down);
  check_device(op, "up", up, "x", x);
  check_dim(op, "up", up, 2, "[M, D]");
  check_shape(op, "up", up, {up.size(0), down.size(0)}, "[M, D] with D as in down");
  if (!bias) return;
  check_dtype(op, "bias", *bias, {ScalarType::Float});
  check_device(op, "bias", *bias, "x", x);
  check_shape(op, "bias", *bias, {up.size(0)}, "[M] with M as in up");
}

}  // namespace cog_rwkv

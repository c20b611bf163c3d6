// host_gather: the checks of its arguments, the same on every device.
#pragma once

#include "../csrc/table.h"

namespace cog_rwkv {

inline void check_host_gather_backward(const Tensor& gradient, const Tensor& sorted, const Tensor& order,
                                       int64_t rows) {
  constexpr const char* op = "host_gather_backward";
  check_floating(op, "gradient", gradient);
  if (gradient.dim() == 0) fail(op, "gradient has shape []; it must be [N, ...]");
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"sorted", sorted}, {"order", order}}) {
    check_dtype(op, name, t, {ScalarType::Long});
    check_device(op, name, t, "gradient", gradient);
    check_shape(op, name, t, {gradient.size(0)}, "[N] with N as in gradient");
  }
  if (rows < 0) fail(op, "rows is " + std::to_string(rows) + "; it must be 0 or more");
}

}  // namespace cog_rwkv

// forward_: the checks of its arguments, but for the weights (csrc/model_weights.h).
#pragma once

#include <optional>

#include "../csrc/packed.h"
#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_forward(const Tensor& x, const Tensor& shift, const Tensor& wkv, const Tensor& rows,
                          const std::optional<Tensor>& cu_seqlens) {
  constexpr const char* op = "forward_";
  check_heads(op, "x", x);
  check_dtype(op, "x", x, {ScalarType::Float});
  const int64_t c = x.size(1);
  check_dtype(op, "shift", shift, {ScalarType::Float});
  check_device(op, "shift", shift, "x", x);
  check_dim(op, "shift", shift, 4, "[layers, 2, R, C]");
  check_shape(op, "shift", shift, {shift.size(0), 2, shift.size(2), c}, "[layers, 2, R, C] with C as in x");
  check_float_or_half(op, "wkv", wkv);
  check_device(op, "wkv", wkv, "x", x);
  check_shape(op, "wkv", wkv, {shift.size(0), shift.size(2), c / 64, 64, 64},
              "[layers, R, C / 64, 64, 64] with layers and R as in shift");
  for (const auto& [name, pool] : {std::pair{"shift", shift}, std::pair{"wkv", wkv}}) {
    if (!pool.is_contiguous()) fail(op, std::string(name) + " must be contiguous: it is written in place");
  }
  if (cu_seqlens) return check_packed(op, rows, *cu_seqlens, x);
  check_dtype(op, "rows", rows, {ScalarType::Long});
  check_device(op, "rows", rows, "x", x);
  check_shape(op, "rows", rows, {x.size(0)}, "[N] with N as in x, where cu_seqlens is left out");
}

}  // namespace cog_rwkv

// forward_: the checks of its arguments, but for the weights (csrc/model_weights.h).
#pragma once

#include <optional>

#include "../csrc/packed.h"
#include "../csrc/table.h"
#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_forward(const Tensor& ids, const Tensor& table, const Tensor& norm_weight, const Tensor& norm_bias,
                          const Tensor& shift, const Tensor& wkv, const Tensor& rows,
                          const std::optional<Tensor>& cu_seqlens) {
  constexpr const char* op = "forward_";
  check_ids(op, ids);
  check_heads(op, "table", table);
  const int64_t c = table.size(1);
  for (const auto& [name, vector] : {std::pair{"norm_weight", norm_weight}, std::pair{"norm_bias", norm_bias}}) {
    check_dtype(op, name, vector, {ScalarType::Float});
    check_device(op, name, vector, "ids", ids);
    check_shape(op, name, vector, {c}, "[C] with C as in table");
  }
  check_dtype(op, "shift", shift, {ScalarType::Float});
  check_device(op, "shift", shift, "ids", ids);
  check_dim(op, "shift", shift, 4, "[layers, 2, R, C]");
  check_shape(op, "shift", shift, {shift.size(0), 2, shift.size(2), c}, "[layers, 2, R, C] with C as in table");
  check_float_or_half(op, "wkv", wkv);
  check_device(op, "wkv", wkv, "ids", ids);
  check_shape(op, "wkv", wkv, {shift.size(0), shift.size(2), c / 64, 64, 64},
              "[layers, R, C / 64, 64, 64] with layers and R as in shift");
  for (const auto& [name, pool] : {std::pair{"shift", shift}, std::pair{"wkv", wkv}}) {
    if (!pool.is_contiguous()) fail(op, std::string(name) + " must be contiguous: it is written in place");
  }
  check_device(op, "rows", rows, "ids", ids);
  if (cu_seqlens) {
    check_device(op, "cu_seqlens", *cu_seqlens, "ids", ids);
    return check_packed(op, rows, *cu_seqlens, ids);
  }
  check_dtype(op, "rows", rows, {ScalarType::Long});
  check_shape(op, "rows", rows, {ids.size(0)}, "[N] with N as in ids, where cu_seqlens is left out");
}

}  // namespace cog_rwkv

// token_shift_: the checks of its arguments, the same on every device.
#pragma once

#include "../csrc/packed.h"

namespace cog_rwkv {

// Returns the distance between two rows of `shift`.
inline int64_t check_token_shift(const Tensor& x, const Tensor& mix, const Tensor& shift, const Tensor& rows,
                                 const Tensor& cu_seqlens) {
  constexpr const char* op = "token_shift_";
  check_float_or_half(op, "x", x);
  check_dim(op, "x", x, 2, "[N, C]");
  check_dtype(op, "mix", mix, {ScalarType::Float});
  check_device(op, "mix", mix, "x", x);
  check_dim(op, "mix", mix, 2, "[M, C]");
  check_shape(op, "mix", mix, {mix.size(0), x.size(1)}, "[M, C] with C as in x");
  check_dtype(op, "shift", shift, {ScalarType::Float});
  check_device(op, "shift", shift, "x", x);
  check_dim(op, "shift", shift, 2, "[R, C]");
  check_shape(op, "shift", shift, {shift.size(0), x.size(1)}, "[R, C] with C as in x");
  check_packed(op, rows, cu_seqlens, x);
  return check_pool(op, "shift", shift);
}

}  // namespace cog_rwkv

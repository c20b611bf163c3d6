// Checks that the model's operators share: [N, C] activations and [C] vectors.
#pragma once

#include "check.h"

namespace cog_rwkv {

// `vector` is [C] in float32 beside `x`, whose last dimension is C.
inline void check_vector(const char* op, const char* name, const Tensor& vector, const Tensor& x) {
  check_dtype(op, name, vector, {ScalarType::Float});
  check_device(op, name, vector, "x", x);
  check_shape(op, name, vector, {x.size(x.dim() - 1)}, "[C] with C as in x");
}

// `x` is [N, C], C in heads of 64.
inline void check_heads(const char* op, const char* name, const Tensor& x) {
  check_float_or_half(op, name, x);
  check_dim(op, name, x, 2, "[N, C]");
  if (x.size(1) % 64 != 0) {
    fail(op, std::string(name) + " has shape " + shape_text(x) + "; C must be a multiple of 64, the head size");
  }
}

}  // namespace cog_rwkv

// binary_linear and pack_signs: the checks of their arguments, the same on every device, and the layout of signs.
#pragma once

#include "../csrc/check.h"
#include "../csrc/math.h"

namespace cog_rwkv {

// A row of K signs takes 16-byte groups of 128 bits: bit i % 32 of word i / 32 is 1 where value i is >= 0. The bits
// behind K are 0 in every row, so that they never differ.
COG_RWKV_BOTH int64_t sign_groups(int64_t k) { return (k + 127) / 128; }
COG_RWKV_BOTH int64_t sign_words(int64_t k) { return 4 * sign_groups(k); }

// What the gradient of a row of the weight is made of: `product` is that of scale * sign(w), `by_scale` that of the
// scale over K. The sign passes its own within [-1, 1]; the magnitude of 0 has no slope.
COG_RWKV_BOTH float weight_gradient(float product, float by_scale, float scale, float w) {
  const float passed = w >= -1.0f && w <= 1.0f ? scale * product : 0.0f;
  return passed + (w > 0.0f ? by_scale : w < 0.0f ? -by_scale : 0.0f);
}

inline void check_matrix(const char* op, const char* name, const Tensor& t, const char* what) {
  check_float_or_half(op, name, t);
  check_dim(op, name, t, 2, what);
}

inline void check_binary_linear(const Tensor& x, const Tensor& weight) {
  constexpr const char* op = "binary_linear";
  check_matrix(op, "x", x, "[N, K]");
  check_matrix(op, "weight", weight, "[M, K]");
  check_device(op, "weight", weight, "x", x);
  check_shape(op, "weight", weight, {weight.size(0), x.size(1)}, "[M, K] with K as in x");
}

inline void check_binary_linear_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  constexpr const char* op = "binary_linear_backward";
  check_matrix(op, "x", x, "[N, K]");
  check_matrix(op, "weight", weight, "[M, K]");
  check_device(op, "weight", weight, "x", x);
  check_shape(op, "weight", weight, {weight.size(0), x.size(1)}, "[M, K] with K as in x");
  check_same_dtype(op, "gradient", gradient, "x", x);
  check_device(op, "gradient", gradient, "x", x);
  check_shape(op, "gradient", gradient, {x.size(0), weight.size(0)}, "[N, M] with N as in x and M as in weight");
}

inline void check_binary_linear_packed(const Tensor& x, const Tensor& signs, const Tensor& scale) {
  constexpr const char* op = "binary_linear_packed";
  check_matrix(op, "x", x, "[N, K]");
  check_dtype(op, "signs", signs, {ScalarType::Int});
  check_device(op, "signs", signs, "x", x);
  check_dim(op, "signs", signs, 2, "[M, 4 ceil(K / 128)]");
  check_shape(op, "signs", signs, {signs.size(0), sign_words(x.size(1))}, "[M, 4 ceil(K / 128)] with K as in x");
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_device(op, "scale", scale, "x", x);
  check_shape(op, "scale", scale, {signs.size(0)}, "[M] with M as in signs");
}

}  // namespace cog_rwkv

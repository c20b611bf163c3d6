// products and active_rows: the checks of their arguments, the same on every device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../csrc/check.h"

namespace cog_rwkv {

inline void check_layout(const char* op, const std::string& name, const Tensor& t) {
  if (!t.is_contiguous()) fail(op, name + " must be contiguous");
}

inline void check_half(const char* op, const std::string& name, const Tensor& t) {
  check_dtype(op, name.c_str(), t, {ScalarType::Half, ScalarType::BFloat16});
}

// [rows, columns], both multiples of 32.
inline void check_thirty_twos(const char* op, const std::string& name, const Tensor& t) {
  check_dim(op, name.c_str(), t, 2, "a matrix");
  if (t.size(0) < 32 || t.size(1) < 32 || t.size(0) % 32 != 0 || t.size(1) % 32 != 0) {
    fail(op, name + " has shape " + shape_text(t) + "; both sizes must be multiples of 32, and not 0");
  }
}

// Whether a matrix lies with its columns one after the other, and not its rows.
inline bool is_transposed(const Tensor& t) {
  return !t.is_contiguous() && t.stride(0) == 1 && t.stride(1) == t.size(0);
}

struct ProductGroup {
  const std::vector<Tensor>&x, &weights;
  const std::vector<std::optional<Tensor>>& biases;
  const std::vector<int64_t>& activations;
  const std::vector<Tensor>& out;
};

// Contiguous [n, m]: float32, or of the dtype of `x` where that is allowed.
inline void check_out(const char* op, const std::string& name, const Tensor& out, const Tensor& x, int64_t m,
                      bool half) {
  if (half && dtype_number(out) != dtype_number(x))
    check_dtype(op, (name + " (not of the dtype of x)").c_str(), out, {ScalarType::Float});
  if (!half) check_dtype(op, name.c_str(), out, {ScalarType::Float});
  check_device(op, name.c_str(), out, "x", x);
  check_shape(op, name.c_str(), out, {x.size(0), m}, "[N, M] with N as in x and M as in weight");
  check_layout(op, name, out);
}

inline void check_product_of(const ProductGroup& group, size_t i) {
  constexpr const char* op = "products_";
  const std::string at = "product " + std::to_string(i) + ": ", x = at + "x", weight = at + "weight",
                    bias = at + "bias";
  check_half(op, x, group.x[i]);
  check_dim(op, x.c_str(), group.x[i], 2, "[N, K]");
  check_same_dtype(op, x.c_str(), group.x[i], "the first x", group.x[0]);
  check_device(op, x.c_str(), group.x[i], "the first x", group.x[0]);
  check_shape(op, x.c_str(), group.x[i], {group.x[0].size(0), group.x[i].size(1)}, "[N, K] with N as in the first x");
  check_same_dtype(op, weight.c_str(), group.weights[i], "x", group.x[i]);
  check_device(op, weight.c_str(), group.weights[i], "x", group.x[i]);
  check_thirty_twos(op, weight, group.weights[i]);
  const int64_t m = group.weights[i].size(0);
  check_shape(op, weight.c_str(), group.weights[i], {m, group.x[i].size(1)}, "[M, K] with K as in x");
  check_layout(op, x, group.x[i]);
  if (!is_transposed(group.weights[i])) check_layout(op, weight + ", or its transpose,", group.weights[i]);
  if (is_transposed(group.weights[i]) != is_transposed(group.weights[0])) {
    fail(op, weight + " must lie as the first one does, by rows or by columns");
  }
  if (group.activations[i] < 0 || group.activations[i] > 3) {
    fail(op, at + "activation is " + std::to_string(group.activations[i]) + "; it must be 0 to 3");
  }
  check_out(op, at + "out", group.out[i], group.x[i], m, true);
  if (!group.biases[i]) return;
  check_dtype(op, bias.c_str(), *group.biases[i], {ScalarType::Float});
  check_device(op, bias.c_str(), *group.biases[i], "x", group.x[i]);
  check_shape(op, bias.c_str(), *group.biases[i], {m}, "[M] with M as in weight");
  check_layout(op, bias, *group.biases[i]);
}

inline void check_products(const ProductGroup& group) {
  const size_t count = group.x.size();
  if (count < 1 || count > 8) fail("products_", std::to_string(count) + " products; 1 to 8 make a group");
  if (group.weights.size() != count || group.biases.size() != count || group.activations.size() != count ||
      group.out.size() != count) {
    fail("products_", "weights, biases, activations and out must be as many as x, " + std::to_string(count));
  }
  for (size_t i = 0; i < count; i++) check_product_of(group, i);
}

inline void check_active_rows(const Tensor& act, const Tensor& value_t, const Tensor& out) {
  constexpr const char* op = "active_rows_";
  check_half(op, "act", act);
  check_dim(op, "act", act, 2, "[N, F]");
  if (act.size(0) < 1 || act.size(0) > 16) fail(op, "act has shape " + shape_text(act) + "; N must be 1 to 16");
  check_same_dtype(op, "value_t", value_t, "act", act);
  check_device(op, "value_t", value_t, "act", act);
  check_thirty_twos(op, "value_t", value_t);
  check_shape(op, "value_t", value_t, {act.size(1), value_t.size(1)}, "[F, C] with F as in act");
  check_layout(op, "act", act);
  check_layout(op, "value_t", value_t);
  check_out(op, "out", out, act, value_t.size(1), false);
}

}  // namespace cog_rwkv

// wkv4 and wkv4_backward: the checks of their arguments, the same on every device.
#pragma once

#include <tuple>

#include "../csrc/check.h"
#include "../csrc/tensor.h"
#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_wkv4(const char* op, const Tensor& w, const Tensor& u, const Tensor& k, const Tensor& v,
                       const Tensor& state) {
  check_float_or_half(op, "k", k);
  check_dim(op, "k", k, 3, "[B, T, C]");
  check_device(op, "k", k, "w", w);
  check_like(op, "v", v, "k", k);
  check_vector(op, "w", w, k);
  check_vector(op, "u", u, k);
  check_dtype(op, "state", state, {ScalarType::Float});
  check_device(op, "state", state, "k", k);
  check_shape(op, "state", state, {k.size(0), 3, k.size(2)}, "[B, 3, C] with B and C as in k");
}

// Gradients of w and u, a part for each sequence, [B, C] in float32, and of k, v and state.
using Wkv4Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline void check_wkv4_backward(const char* op, const Tensor& d_y, const Tensor& d_end, const Tensor& w,
                                const Tensor& u, const Tensor& k, const Tensor& v, const Tensor& state) {
  check_wkv4(op, w, u, k, v, state);
  check_like(op, "d_y", d_y, "k", k);
  check_like(op, "d_end", d_end, "state", state);
}

}  // namespace cog_rwkv

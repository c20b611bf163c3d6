// wkv5 and wkv6, forward and backward, are four scans of one kind over the tokens of a head, with a matrix M of 64 x
// 64:
//
//   out_t = M x_t, then M <- M decayed by d_t, + p_t q_t'
//
//            M                  p    q    x    decay of    order
//   y        S [value, key]     v    k    r    columns     forward
//   d_r      S [key, value]     k    v    d_y  rows        forward
//   d_v      dS [value, key]    d_y  r    k    columns     backward
//   d_k      dS [key, value]    r    d_y  v    rows        backward
//
// and the terms of the bonus u, which need no M. decay = exp(-exp(w)), w raw.
#pragma once

#include <tuple>

#include "check.h"
#include "tensor.h"
#include "vectors.h"

namespace cog_rwkv {

constexpr int64_t kScanHead = 64;  // the size of a head

// r, w, k, v alike but for wkv5's w, which is [H, 64] as u is, in float32.
inline void check_decay_scan(const char* op, const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                             const Tensor& u, const Tensor& state, bool constant) {
  check_float_or_half(op, "r", r);
  check_dim(op, "r", r, 4, "[B, T, H, 64]");
  check_shape(op, "r", r, {r.size(0), r.size(1), r.size(2), kScanHead}, "[B, T, H, 64]");
  const auto check_heads = [&](const char* name, const Tensor& t) {
    check_dtype(op, name, t, {ScalarType::Float});
    check_device(op, name, t, "r", r);
    check_shape(op, name, t, {r.size(2), kScanHead}, "[H, 64] with H as in r");
  };
  if (constant) {
    check_heads("w", w);
  } else {
    check_like(op, "w", w, "r", r);
  }
  check_like(op, "k", k, "r", r);
  check_like(op, "v", v, "r", r);
  check_heads("u", u);
  check_dtype(op, "state", state, {ScalarType::Float});
  check_device(op, "state", state, "r", r);
  check_shape(op, "state", state, {r.size(0), r.size(2), kScanHead, kScanHead}, "[B, H, 64, 64] with B and H as in r");
}

inline void check_decay_scan_backward(const char* op, const Tensor& d_y, const Tensor& d_end, const Tensor& r,
                                      const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& u,
                                      const Tensor& state, bool constant) {
  check_decay_scan(op, r, w, k, v, u, state, constant);
  check_like(op, "d_y", d_y, "r", r);
  check_like(op, "d_end", d_end, "state", state);
}

// Gradients of r, w, k, v, u, state. Of what all sequences share, u and wkv5's w, a part for each: [B, H, 64], float32.
using ScanGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

}  // namespace cog_rwkv

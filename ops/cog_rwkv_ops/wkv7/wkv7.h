// wkv7 and wkv7_: the checks of their arguments, the same on every device.
#pragma once

#include <tuple>

#include "../csrc/packed.h"
#include "../csrc/vectors.h"

namespace cog_rwkv {

constexpr int64_t kHead = 64;  // the size of a head

// r, w, k, v, a, b are alike.
inline void check_wkv7_inputs(const char* op, const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                              const Tensor& a, const Tensor& b) {
  check_float_or_half(op, "r", r);
  check_like(op, "w", w, "r", r);
  check_like(op, "k", k, "r", r);
  check_like(op, "v", v, "r", r);
  check_like(op, "a", a, "r", r);
  check_like(op, "b", b, "r", r);
}

inline void check_wkv7(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& b, const Tensor& state) {
  constexpr const char* op = "wkv7";
  check_dim(op, "r", r, 4, "[B, T, H, 64]");
  check_shape(op, "r", r, {r.size(0), r.size(1), r.size(2), kHead}, "[B, T, H, 64]");
  check_wkv7_inputs(op, r, w, k, v, a, b);
  check_dtype(op, "state", state, {ScalarType::Float});
  check_device(op, "state", state, "r", r);
  check_shape(op, "state", state, {r.size(0), r.size(2), kHead, kHead}, "[B, H, 64, 64] with B and H as in r");
}

// Of r, w, k, v, a, b and state.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline void check_wkv7_backward(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w,
                                const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
                                const Tensor& state) {
  check_wkv7(r, w, k, v, a, b, state);
  check_like("wkv7_backward", "d_y", d_y, "r", r);
  check_like("wkv7_backward", "d_end", d_end, "state", state);
}

// Returns the distance between two rows of `pool`.
inline int64_t check_wkv7_packed(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                                 const Tensor& b, const Tensor& pool, const Tensor& rows, const Tensor& cu_seqlens) {
  constexpr const char* op = "wkv7_";
  check_heads(op, "r", r);
  check_wkv7_inputs(op, r, w, k, v, a, b);
  check_float_or_half(op, "pool", pool);
  check_device(op, "pool", pool, "r", r);
  check_dim(op, "pool", pool, 4, "[R, H, 64, 64]");
  check_shape(op, "pool", pool, {pool.size(0), r.size(1) / kHead, kHead, kHead}, "[R, H, 64, 64] with H * 64 as in r");
  check_packed(op, rows, cu_seqlens, r);
  return check_pool(op, "pool", pool);
}

// wkv7_ on CUDA: forward_ calls it as well.
Tensor wkv7_packed_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                        const Tensor& b, const Tensor& pool, const Tensor& rows, const Tensor& cu_seqlens);

}  // namespace cog_rwkv

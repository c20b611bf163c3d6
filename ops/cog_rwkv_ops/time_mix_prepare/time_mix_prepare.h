// time_mix_prepare: the checks of its arguments, the same on every device.
#pragma once

#include <optional>

#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_time_mix_prepare(const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& k_k,
                                   const Tensor& k_a, const std::optional<Tensor>& v_first,
                                   const std::optional<Tensor>& v_mix) {
  constexpr const char* op = "time_mix_prepare";
  check_heads(op, "k", k);
  check_like(op, "v", v, "k", k);
  check_like(op, "a", a, "k", k);
  check_vector(op, "k_k", k_k, k);
  check_vector(op, "k_a", k_a, k);
  if (v_first.has_value() != v_mix.has_value()) fail(op, "v_first and v_mix must be given together");
  if (!v_first) return;
  check_like(op, "v_first", *v_first, "k", k);
  check_like(op, "v_mix", *v_mix, "k", k);
}

}  // namespace cog_rwkv

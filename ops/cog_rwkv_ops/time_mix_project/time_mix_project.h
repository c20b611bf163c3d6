// time_mix_project: its arguments and their checks, the same on every device.
#pragma once

#include <optional>
#include <string>

#include "../csrc/packed_weight.h"

namespace cog_rwkv {

// A low-rank projection: f(x down^T) up^T + bias.
struct LowRank {
  const char* name;
  Tensor down, up;
  std::optional<Tensor> bias;
};

struct Projections {
  Tensor receptance, key, value;
  LowRank decay, rate, gate;
  std::optional<LowRank> mix;
};

inline void check_low_rank(const LowRank& p, const Tensor& x) {
  constexpr const char* op = "time_mix_project";
  const std::string down = std::string(p.name) + "1", up = std::string(p.name) + "2", bias = std::string(p.name) + "0";
  const int64_t c = x.size(2);
  check_float_or_half(op, down.c_str(), p.down);
  check_device(op, down.c_str(), p.down, "x", x);
  check_dim(op, down.c_str(), p.down, 2, "[D, C]");
  check_shape(op, down.c_str(), p.down, {p.down.size(0), c}, "[D, C] with C as in x");
  check_same_dtype(op, up.c_str(), p.up, down.c_str(), p.down);
  check_device(op, up.c_str(), p.up, "x", x);
  check_shape(op, up.c_str(), p.up, {c, p.down.size(0)}, ("[C, D] with D as in " + down).c_str());
  if (!p.bias) return;
  check_dtype(op, bias.c_str(), *p.bias, {ScalarType::Float});
  check_device(op, bias.c_str(), *p.bias, "x", x);
  check_shape(op, bias.c_str(), *p.bias, {c}, "[C] with C as in x");
}

inline void check_square(const char* name, const Tensor& weight, const Tensor& x) {
  constexpr const char* op = "time_mix_project";
  check_weight(op, name, weight, x, x.size(2), "[C, C] with C as in x");
  if (weight.size(0) != x.size(2)) {
    fail(op, std::string(name) + " has shape " + shape_text(weight) + "; it must have as many rows as x has columns, " +
                 std::to_string(x.size(2)));
  }
}

inline void check_time_mix_project(const Tensor& x, const Projections& p) {
  constexpr const char* op = "time_mix_project";
  check_float_or_half(op, "x", x);
  check_dim(op, "x", x, 3, "[6, N, C]");
  check_shape(op, "x", x, {6, x.size(1), x.size(2)}, "[6, N, C]");
  check_square("receptance", p.receptance, x);
  check_square("key", p.key, x);
  check_square("value", p.value, x);
  check_low_rank(p.decay, x);
  check_low_rank(p.rate, x);
  check_low_rank(p.gate, x);
  if (p.mix) check_low_rank(*p.mix, x);
}

// The arguments as PyTorch gives them. v1, v2 and v0 come together or not at all.
inline Projections projections(const Tensor& receptance, const Tensor& key, const Tensor& value, const Tensor& w1,
                               const Tensor& w2, const Tensor& w0, const Tensor& a1, const Tensor& a2, const Tensor& a0,
                               const Tensor& g1, const Tensor& g2, const std::optional<Tensor>& v1,
                               const std::optional<Tensor>& v2, const std::optional<Tensor>& v0) {
  if (v1.has_value() != v2.has_value() || v1.has_value() != v0.has_value()) {
    fail("time_mix_project", "v1, v2 and v0 must be given together or not at all");
  }
  Projections p{receptance,  key, value, {"w", w1, w2, w0}, {"a", a1, a2, a0}, {"g", g1, g2, std::nullopt},
                std::nullopt};
  if (v1) p.mix = LowRank{"v", *v1, *v2, *v0};
  return p;
}

}  // namespace cog_rwkv

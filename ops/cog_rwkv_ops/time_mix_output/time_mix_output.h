// time_mix_output: the checks of its arguments, the same on every device.
#pragma once

#include "../csrc/vectors.h"

namespace cog_rwkv {

inline void check_time_mix_output(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g,
                                  const Tensor& r_k, const Tensor& weight, const Tensor& bias) {
  constexpr const char* op = "time_mix_output";
  check_heads(op, "y", y);
  check_like(op, "r", r, "y", y);
  check_like(op, "k", k, "y", y);
  check_like(op, "v", v, "y", y);
  check_like(op, "g", g, "y", y);
  check_vector(op, "r_k", r_k, y);
  check_vector(op, "weight", weight, y);
  check_vector(op, "bias", bias, y);
}

// On CUDA: forward_ calls it as well.
Tensor time_mix_output_cuda(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g,
                            const Tensor& r_k, const Tensor& weight, const Tensor& bias, double eps);

}  // namespace cog_rwkv

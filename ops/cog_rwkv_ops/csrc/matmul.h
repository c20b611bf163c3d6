// out = f(x weight^T + bias) on the CPU, over PyTorch's threads: what `linear`, `low_rank` and `time_mix_project` share.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "packed_weight.h"
#include "tensor.h"

namespace cog_rwkv {

enum class Activation { none, tanh, sigmoid };

struct MatmulArgs {
  const float* x;     // [n_size, k_size]
  const float* bias;  // [m_size], or null
  float* out;         // [n_size, m_size]
  int64_t n_size, m_size, k_size;
  Activation activation;
};

// A product, and its weight: contiguous [m_size, k_size] in float32, float16 or bfloat16, or packed rows of that size.
struct MatmulJob {
  MatmulArgs args;
  Tensor weight;
};

// Does the jobs, which do not depend on each other, as one piece of work. Each result has the same bits whatever the
// number of threads, of rows of x and of jobs beside it.
void matmul(const std::vector<MatmulJob>& jobs);

}  // namespace cog_rwkv

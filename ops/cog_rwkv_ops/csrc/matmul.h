// out = f(x weight^T + bias) on the CPU, over PyTorch's threads: what `linear`, `low_rank` and `decode_`
// share.
#pragma once

#include <cstdint>
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

// Jobs that do not depend on each other, as one piece of work, in units of 16 rows of a weight by 256 rows of x. Each
// result has the same bits whoever does which units, and whatever the number of rows of x and of jobs beside it.
class MatmulWork {
 public:
  explicit MatmulWork(std::vector<MatmulJob> jobs);
  int64_t units() const { return units_; }
  int64_t products() const { return products_; }  // of two numbers, in all
  void run(int64_t begin, int64_t end) const;     // units begin to end

 private:
  using Range = void (*)(const MatmulArgs&, const void*, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* panel);
  struct Part {
    Range range;
    int64_t columns, units;  // of 256 rows of x, and of all
  };
  static Range range_for(const Tensor& weight);
  void run_part(size_t i, int64_t begin, int64_t end, float* panel) const;

  std::vector<MatmulJob> jobs_;
  std::vector<Part> parts_;
  int64_t units_ = 0, products_ = 0, panel_ = 0;
};

// Does the jobs, over PyTorch's threads.
void matmul(std::vector<MatmulJob> jobs);

}  // namespace cog_rwkv

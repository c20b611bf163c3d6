// out = x weight^T + bias on the CPU, over PyTorch's threads: what `linear` and `low_rank` share.
//
// It includes each_cpu.h; a file with more kernels defines COG_RWKV_KERNELS as a header that includes matmul_kernel.h.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cog_rwkv {

struct MatmulArgs {
  const float* x;     // [n_size, k_size]
  const float* bias;  // [m_size], or null
  float* out;         // [n_size, m_size]
  int64_t n_size, m_size, k_size;
};

}  // namespace cog_rwkv

#ifndef COG_RWKV_KERNELS
#define COG_RWKV_KERNELS "matmul_kernel.h"
#endif
#include "each_cpu.h"
#include "floats.h"

namespace cog_rwkv {

// `weight` is [m_size, k_size]. Cuts the work into units of 16 rows of the weight and 256 rows of x, as many as are
// worth a thread.
template <class W>
void matmul(const MatmulArgs& args, const W* weight) {
  constexpr int64_t unit = 16, block = 256, worth_a_thread = 40000;  // rows, rows, products
  const auto range = COG_RWKV_KERNEL(matmul_range<W>);
  const int64_t units = (args.m_size + unit - 1) / unit, blocks = (args.n_size + block - 1) / block;
  const int64_t products = unit * std::max<int64_t>(args.k_size, 1) * std::min(args.n_size, block);
  if (units * blocks == 0) return;
  parallel_for(units * blocks, std::max<int64_t>(1, worth_a_thread / products), [&](int64_t begin, int64_t end) {
    const auto panel = scratch(args.n_size >= 16 ? 8 * args.k_size + 16 : 0);
    while (begin < end) {
      const int64_t b = begin / units, first = begin % units, last = std::min(units, first + end - begin);
      const int64_t m1 = std::min(args.m_size, last * unit), n1 = std::min(args.n_size, (b + 1) * block);
      range(args, weight, first * unit, m1, b * block, n1, panel.get());
      begin += last - first;
    }
  });
}

}  // namespace cog_rwkv

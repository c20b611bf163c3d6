// The work of matmul.h.
#include "matmul.h"

#include <algorithm>

#define COG_RWKV_KERNELS "matmul_kernel.h"
#include "each_cpu.h"
#include "floats.h"

namespace cog_rwkv {
namespace {

constexpr int64_t kUnit = 16, kBlock = 256;  // rows of a weight, rows of x

}  // namespace

MatmulWork::Range MatmulWork::range_for(const Tensor& weight) {
  switch (weight.scalar_type()) {
    case ScalarType::Byte:
      return COG_RWKV_KERNEL(matmul_range<PackedBFloat16>);
    case ScalarType::BFloat16:
      return COG_RWKV_KERNEL(matmul_range<BFloat16>);
    case ScalarType::Half:
      return COG_RWKV_KERNEL(matmul_range<Half>);
    default:
      return COG_RWKV_KERNEL(matmul_range<float>);
  }
}

MatmulWork::MatmulWork(std::vector<MatmulJob> jobs) : jobs_(std::move(jobs)) {
  for (const MatmulJob& job : jobs_) {
    const MatmulArgs& a = job.args;
    const int64_t columns = (a.m_size + kUnit - 1) / kUnit, blocks = (a.n_size + kBlock - 1) / kBlock;
    parts_.push_back({range_for(job.weight), columns, columns * blocks});
    units_ += columns * blocks;
    products_ += a.m_size * a.n_size * std::max<int64_t>(a.k_size, 1);
    const bool packed = job.weight.scalar_type() == ScalarType::Byte;  // then for the last rows too
    if (a.n_size > 1 || packed) panel_ = std::max(panel_, 8 * a.k_size + 16);
  }
}

void MatmulWork::run_part(size_t i, int64_t begin, int64_t end, float* panel) const {
  const MatmulArgs& a = jobs_[i].args;
  const int64_t columns = parts_[i].columns;
  while (begin < end) {
    const int64_t block = begin / columns, first = begin % columns, last = std::min(columns, first + end - begin);
    const int64_t m1 = std::min(a.m_size, last * kUnit), n1 = std::min(a.n_size, (block + 1) * kBlock);
    parts_[i].range(a, jobs_[i].weight.const_data_ptr(), first * kUnit, m1, block * kBlock, n1, panel);
    begin += last - first;
  }
}

void MatmulWork::run(int64_t begin, int64_t end) const {
  const auto panel = scratch(panel_);
  for (size_t i = 0; i < jobs_.size(); i++) {
    const int64_t units = parts_[i].units;
    if (begin < units && end > 0) run_part(i, std::max<int64_t>(begin, 0), std::min(end, units), panel.get());
    begin -= units, end -= units;
  }
}

void matmul(std::vector<MatmulJob> jobs) {
  constexpr int64_t worth_a_thread = 40000;  // products
  const MatmulWork work(std::move(jobs));
  if (work.units() == 0) return;
  const int64_t grain = std::max<int64_t>(1, worth_a_thread * work.units() / work.products());
  parallel_for(work.units(), grain, [&](int64_t begin, int64_t end) { work.run(begin, end); });
}

}  // namespace cog_rwkv

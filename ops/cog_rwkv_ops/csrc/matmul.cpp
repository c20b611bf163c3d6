// The work of matmul.h, cut into units for the threads.
#include "matmul.h"

#include <algorithm>

#define COG_RWKV_KERNELS "matmul_kernel.h"
#include "each_cpu.h"
#include "floats.h"

namespace cog_rwkv {
namespace {

using Range = void (*)(const MatmulArgs&, const void*, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* panel);

template <class W>
Range range_of() {
  return COG_RWKV_KERNEL(matmul_range<W>);
}

Range range_for(const Tensor& weight) {
  switch (weight.scalar_type()) {
    case ScalarType::Byte:
      return range_of<PackedBFloat16>();
    case ScalarType::BFloat16:
      return range_of<BFloat16>();
    case ScalarType::Half:
      return range_of<Half>();
    default:
      return range_of<float>();
  }
}

// A job in units of 16 rows of the weight by 256 rows of x.
struct Work {
  static constexpr int64_t kUnit = 16, kBlock = 256;
  const MatmulArgs& args;
  const void* weight;
  Range range;
  int64_t columns, units;  // of one block of x, and of all

  explicit Work(const MatmulJob& job)
      : args(job.args), weight(job.weight.const_data_ptr()), range(range_for(job.weight)) {
    columns = (args.m_size + kUnit - 1) / kUnit;
    units = columns * ((args.n_size + kBlock - 1) / kBlock);
  }

  int64_t products() const { return args.m_size * args.n_size * std::max<int64_t>(args.k_size, 1); }

  // Units begin to end.
  void run(int64_t begin, int64_t end, float* panel) const {
    while (begin < end) {
      const int64_t block = begin / columns, first = begin % columns, last = std::min(columns, first + end - begin);
      const int64_t m1 = std::min(args.m_size, last * kUnit), n1 = std::min(args.n_size, (block + 1) * kBlock);
      range(args, weight, first * kUnit, m1, block * kBlock, n1, panel);
      begin += last - first;
    }
  }
};

}  // namespace

void matmul(const std::vector<MatmulJob>& jobs) {
  constexpr int64_t worth_a_thread = 40000;  // products
  std::vector<Work> work(jobs.begin(), jobs.end());
  int64_t units = 0, products = 0, longest = 0;
  for (const Work& one : work) {
    units += one.units;
    products += one.products();
    longest = std::max(longest, one.args.k_size);
  }
  if (units == 0) return;
  parallel_for(units, std::max<int64_t>(1, worth_a_thread * units / products), [&](int64_t begin, int64_t end) {
    const auto panel = scratch(8 * longest + 16);
    for (const Work& one : work) {
      if (begin < one.units && end > 0) one.run(std::max<int64_t>(begin, 0), std::min(end, one.units), panel.get());
      begin -= one.units, end -= one.units;
    }
  });
}

}  // namespace cog_rwkv

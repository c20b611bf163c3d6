// time_mix_output: schema and CPU kernel.
#include "time_mix_output.h"

#include "args.h"

#define COG_RWKV_KERNELS "../time_mix_output/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor time_mix_output_cpu(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g,
                           const Tensor& r_k, const Tensor& weight, const Tensor& bias, double eps) {
  check_time_mix_output(y, r, k, v, g, r_k, weight, bias);
  const Tensor state = as_contiguous(y), receptance = as_contiguous(r), key = as_contiguous(k),
               value = as_contiguous(v);
  const Tensor gate = as_contiguous(g), bonus = as_contiguous(r_k), scale = as_contiguous(weight),
               shift = as_contiguous(bias);
  Tensor out = empty_tensor(y, y.sizes());
  const int64_t heads = y.size(1) / 64;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const OutputArgs<T> args{data<T>(state),       data<T>(receptance),    data<T>(key),       data<T>(value),
                             data<T>(gate),        data<float>(bonus),     data<float>(scale), data<float>(shift),
                             mutable_data<T>(out), static_cast<float>(eps)};
    const auto kernel = COG_RWKV_KERNEL(time_mix_output_heads<T>);
    parallel_for(y.size(0) * heads, 128, [&](int64_t begin, int64_t end) { kernel(args, begin, end, heads); });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "time_mix_output(Tensor y, Tensor r, Tensor k, Tensor v, Tensor g, Tensor r_k, Tensor weight, Tensor bias, "
      "float eps=64e-5) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("time_mix_output", TORCH_BOX(&time_mix_output_cpu)); }

}  // namespace cog_rwkv

// layer_norm: schema and CPU kernel.
#include "layer_norm.h"

#define COG_RWKV_KERNELS "../layer_norm/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

Tensor layer_norm_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check_layer_norm(x, weight, bias);
  const Tensor rows = as_contiguous(x), w = as_contiguous(weight), b = as_contiguous(bias);
  const int64_t n = x.size(0), c = x.size(1);
  Tensor out = empty_tensor(x, x.sizes());
  if (n * c == 0) return out;
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = COG_RWKV_KERNEL(layer_norm_rows<T>);
    parallel_for(n, 1 + 32768 / c, [&](int64_t begin, int64_t end) {
      kernel(data<T>(rows), data<float>(w), data<float>(b), mutable_data<T>(out), begin, end, c,
             static_cast<float>(eps));
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-5) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("layer_norm", TORCH_BOX(&layer_norm_cpu)); }

}  // namespace cog_rwkv

// add: CUDA kernel and launch.
#include "../csrc/elementwise.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

struct Sum {
  template <class A>
  __device__ A operator()(A p, A q) const {
    return p + q;
  }
};

Tensor add_cuda(const Tensor& a, const Tensor& b) {
  check_floating("add", "a", a);
  check_like("add", "b", b, "a", a);
  const Launch launch("add", a);
  const Tensor x = as_contiguous(a), y = as_contiguous(b);
  Tensor out = empty_tensor(a, a.sizes());
  dispatch_floating(a.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    elementwise_cuda(launch, mutable_data<T>(out), a.numel(), Sum{}, data<T>(x), data<T>(y));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("add", TORCH_BOX(&add_cuda)); }

}  // namespace cog_rwkv

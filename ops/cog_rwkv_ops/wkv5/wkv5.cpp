// wkv5 and wkv5_backward: schemas and CPU kernels, scans of csrc/decay_scan.h.
#include "../csrc/decay_scan_cpu.h"

namespace cog_rwkv {
namespace {

std::tuple<Tensor, Tensor> wkv5_cpu(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& u,
                                    const Tensor& state) {
  return scan_forward_cpu<true>("wkv5", r, w, k, v, u, state);
}

ScanGradients wkv5_backward_cpu(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w,
                                const Tensor& k, const Tensor& v, const Tensor& u, const Tensor& state) {
  return scan_backward_cpu<true>("wkv5_backward", d_y, d_end, r, w, k, v, u, state);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("wkv5(Tensor r, Tensor w, Tensor k, Tensor v, Tensor u, Tensor state) -> (Tensor, Tensor)");
  m.def(
      "wkv5_backward(Tensor d_y, Tensor d_end, Tensor r, Tensor w, Tensor k, Tensor v, Tensor u, Tensor state) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("wkv5", TORCH_BOX(&wkv5_cpu));
  m.impl("wkv5_backward", TORCH_BOX(&wkv5_backward_cpu));
}

}  // namespace cog_rwkv

// wkv5 and wkv5_backward on CUDA: scans of csrc/decay_scan.cuh.
#include "../csrc/decay_scan.cuh"

namespace cog_rwkv {
namespace {

std::tuple<Tensor, Tensor> wkv5_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                                     const Tensor& u, const Tensor& state) {
  return scan_forward_cuda<true>("wkv5", r, w, k, v, u, state);
}

ScanGradients wkv5_backward_cuda(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w,
                                 const Tensor& k, const Tensor& v, const Tensor& u, const Tensor& state) {
  return scan_backward_cuda<true>("wkv5_backward", d_y, d_end, r, w, k, v, u, state);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv5", TORCH_BOX(&wkv5_cuda));
  m.impl("wkv5_backward", TORCH_BOX(&wkv5_backward_cuda));
}

}  // namespace cog_rwkv

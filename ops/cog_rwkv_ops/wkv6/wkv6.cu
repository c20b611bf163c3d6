// wkv6 and wkv6_backward on CUDA: scans of csrc/decay_scan.cuh.
#include "../csrc/decay_scan.cuh"

namespace cog_rwkv {
namespace {

std::tuple<Tensor, Tensor> wkv6_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                                     const Tensor& u, const Tensor& state) {
  return scan_forward_cuda<false>("wkv6", r, w, k, v, u, state);
}

ScanGradients wkv6_backward_cuda(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w,
                                 const Tensor& k, const Tensor& v, const Tensor& u, const Tensor& state) {
  return scan_backward_cuda<false>("wkv6_backward", d_y, d_end, r, w, k, v, u, state);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv6", TORCH_BOX(&wkv6_cuda));
  m.impl("wkv6_backward", TORCH_BOX(&wkv6_backward_cuda));
}

}  // namespace cog_rwkv

// wkv4 and wkv4_backward on CUDA: the choice of the kernel, and the launches. walk.cuh says how they work.
#include "wkv4.h"

#include "../csrc/aligned.cuh"
#include "backward.cuh"
#include "forward.cuh"

namespace cog_rwkv {
namespace {

// Threads of a multiprocessor from which one segment is enough, as every token then is computed once, and those that
// segments are to bring it to: 6 warps and 12.
constexpr int64_t kEnough = 192, kWanted = 384;

struct Grid4 {
  dim3 grid, block;
};

// For pieces of so many tokens and `each` channels a thread.
Grid4 grid_of(const char* op, const Tensor& k, int each, int piece) {
  if (k.size(0) > 65535) fail(op, "k has shape " + shape_text(k) + "; B must be at most 65535 on CUDA");
  const int64_t wide = (k.size(2) + each - 1) / each, threads = k.size(0) * wide;
  const int64_t multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  const int most = kThreads4 / kLanes * each;
  int segments = 1;
  if (threads < kEnough * multiprocessors) {
    while (segments < most && segments * threads < kWanted * multiprocessors && segments * piece < k.size(1))
      segments *= 2;
  }
  const int lanes = segments > 1 ? kLanes / each : kLanes;
  return {dim3(static_cast<unsigned>((wide + lanes - 1) / lanes), static_cast<unsigned>(k.size(0))),
          dim3(lanes, segments)};
}

template <class T, int each>
void launch_forward(const Launch& launch, const Tensor& k, const Wkv4<T>& work) {
  const Grid4 shape = grid_of("wkv4", k, each, kPiece4<T, each>);
  const auto kernel = shape.block.y > 1 ? wkv4_kernel<T, each, true> : wkv4_kernel<T, each, false>;
  kernel<<<shape.grid, shape.block, 0, launch.stream>>>(work);
  launch.check();
}

template <class T>
void launch_backward(const Launch& launch, const Tensor& k, const Wkv4<T>& work) {
  const Grid4 shape = grid_of("wkv4_backward", k, 1, kPieceBack4);
  const auto kernel = shape.block.y > 1 ? wkv4_backward_kernel<T, true> : wkv4_backward_kernel<T, false>;
  kernel<<<shape.grid, shape.block, 0, launch.stream>>>(work);
  launch.check();
}

std::tuple<Tensor, Tensor> wkv4_cuda(const Tensor& w, const Tensor& u, const Tensor& k, const Tensor& v,
                                     const Tensor& state) {
  check_wkv4("wkv4", w, u, k, v, state);
  const Launch launch("wkv4", k);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state);
  const Tensor y = empty_tensor(k, k.sizes()), after = empty_tensor(state, state.sizes());
  if (state.numel() == 0) return {y, after};
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv4<T> work{.w = data<float>(ws),
                       .u = data<float>(us),
                       .state = data<float>(before),
                       .k = data<T>(ks),
                       .v = data<T>(vs),
                       .tokens = k.size(1),
                       .channels = k.size(2),
                       .end = mutable_data<float>(after),
                       .y = mutable_data<T>(y)};
    // Two channels a thread, where they can be loaded at once: rows of an even length from a boundary on.
    const bool pairs = k.size(2) % 2 == 0 && aligned16(work.k, work.v);
    pairs ? launch_forward<T, 2>(launch, k, work) : launch_forward<T, 1>(launch, k, work);
  });
  return {y, after};
}

Wkv4Gradients wkv4_backward_cuda(const Tensor& d_y, const Tensor& d_end, const Tensor& w, const Tensor& u,
                                 const Tensor& k, const Tensor& v, const Tensor& state) {
  check_wkv4_backward("wkv4_backward", d_y, d_end, w, u, k, v, state);
  const Launch launch("wkv4_backward", k);
  const Tensor ws = as_contiguous(w), us = as_contiguous(u), ks = as_contiguous(k), vs = as_contiguous(v),
               before = as_contiguous(state), dy = as_contiguous(d_y), end = as_contiguous(d_end);
  const int64_t batch = k.size(0), tokens = k.size(1), channels = k.size(2);
  const Tensor d_w = empty_tensor(state, {batch, channels}), d_u = empty_tensor(state, {batch, channels});
  const Tensor d_k = empty_tensor(k, k.sizes()), d_v = empty_tensor(k, k.sizes());
  const Tensor d_state = empty_tensor(state, state.sizes());
  if (state.numel() == 0) return {d_w, d_u, d_k, d_v, d_state};
  const Tensor kept = empty_tensor(state, {3, batch, (tokens + kPieceBack4 - 1) / kPieceBack4, channels});
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv4<T> work{.w = data<float>(ws),
                       .u = data<float>(us),
                       .state = data<float>(before),
                       .k = data<T>(ks),
                       .v = data<T>(vs),
                       .tokens = tokens,
                       .channels = channels,
                       .d_y = data<T>(dy),
                       .d_end = data<float>(end),
                       .kept = mutable_data<float>(kept),
                       .d_w = mutable_data<float>(d_w),
                       .d_u = mutable_data<float>(d_u),
                       .d_state = mutable_data<float>(d_state),
                       .d_k = mutable_data<T>(d_k),
                       .d_v = mutable_data<T>(d_v)};
    launch_backward(launch, k, work);
  });
  return {d_w, d_u, d_k, d_v, d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv4", TORCH_BOX(&wkv4_cuda));
  m.impl("wkv4_backward", TORCH_BOX(&wkv4_backward_cuda));
}

}  // namespace cog_rwkv

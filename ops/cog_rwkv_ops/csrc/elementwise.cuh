// CUDA kernel of operators whose output element i depends on the inputs' elements i alone.
#pragma once

#include "cuda.cuh"

namespace cog_rwkv {

// W elements a thread and step (16 bytes where the pointers allow it, else one), then the rest one by one.
// Indices are 64 bits wide: n may be beyond 2^31.
template <int W, class T, class F, class... In>
__global__ void __launch_bounds__(256)
    elementwise_kernel(T* __restrict__ out, int64_t n, F f, const In* __restrict__... in) {
  using A = arithmetic_t<T>;
  const int64_t thread = blockIdx.x * int64_t{256} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{256};
  const int64_t vectors = n / W;
  for (int64_t v = thread; v < vectors; v += threads) {
    auto apply = [&](const Vector<In, W>&... x) {
      Vector<T, W> y;
#pragma unroll
      for (int i = 0; i < W; i++) y.values[i] = static_cast<T>(f(static_cast<A>(x.values[i])...));
      store_vector<T, W>(out + v * W, y);
    };
    apply(load_vector<In, W>(in + v * W)...);
  }
  for (int64_t i = vectors * W + thread; i < n; i += threads) out[i] = static_cast<T>(f(static_cast<A>(in[i])...));
}

// out[i] = f(in[i]...) for i < n, all of type T, on the device and stream of `launch`.
template <class T, class F, class... In>
void elementwise_cuda(const Launch& launch, T* out, int64_t n, F f, const In*... in) {
  constexpr int W = 16 / sizeof(T);
  if (n == 0) return;  // a launch of no blocks is an error
  if (aligned16(out, in...))
    elementwise_kernel<W><<<blocks(n, 256 * W), 256, 0, launch.stream>>>(out, n, f, in...);
  else
    elementwise_kernel<1><<<blocks(n, 256), 256, 0, launch.stream>>>(out, n, f, in...);
  launch.check();
}

}  // namespace cog_rwkv

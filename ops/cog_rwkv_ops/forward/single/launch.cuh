// The launch of kernel.cuh, for the files that compile it.
#pragma once

#include "../../csrc/chain.cuh"
#include "kernel.cuh"
#include "step.h"

namespace cog_rwkv {

template <class W, class S, int V>
void launch_single_kernel(const char* op, cudaStream_t stream, const Single& p, const SingleCut& cut) {
  static_assert(sizeof(SingleMemory) <= kFixedBytes);
  const auto kernel = single_kernel<W, S, V>;
  const size_t bytes = sizeof(SingleMemory) + cut.vector_bytes;
  ready_to_chain(op, reinterpret_cast<const void*>(kernel), bytes);
  // All blocks run at once, or none does.
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cut.blocks), config.blockDim = dim3(kReaders + 32);
  config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &together, config.numAttrs = 1;
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, p));
}

template <class W>
void launch_single(const char* op, cudaStream_t stream, ScalarType state, const Single& p, const SingleCut& cut) {
  dispatch_float_or_half(state, [&](auto s) {
    using S = typename decltype(s)::type;
    if (p.c <= 1024) return launch_single_kernel<W, S, 4>(op, stream, p, cut);
    launch_single_kernel<W, S, 8>(op, stream, p, cut);
  });
}

}  // namespace cog_rwkv

// products_wide.cuh for float16.
#include "products_wide_launch.cuh"

namespace cog_rwkv {

void wide_launch_half(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t clusters) {
  launch_wide<Half>(op, stream, list, transposed, clusters);
}

// Every kernel of products_wide.cuh takes a multiprocessor for a block.
int wide_clusters(const char* op, unsigned blocks) {
  using S = WideShape<128, 256>;
  const auto kernel = wide_kernel<Half, S, false>;
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::bytes));
  return clusters_at_once(op, kernel, blocks, kWideThreads, S::bytes);
}

}  // namespace cog_rwkv

// products_wide.cuh for bfloat16.
#include "products_wide_launch.cuh"

namespace cog_rwkv {

void wide_launch_bfloat16(const char* op, cudaStream_t stream, const WideList& list, bool transposed,
                          uint32_t multiprocessors) {
  launch_wide<BFloat16>(op, stream, list, transposed, multiprocessors);
}

}  // namespace cog_rwkv

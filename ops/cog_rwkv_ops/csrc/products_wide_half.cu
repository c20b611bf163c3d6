// products_wide.cuh for float16.
#include "products_wide_launch.cuh"

namespace cog_rwkv {

void wide_launch_half(const char* op, cudaStream_t stream, const WideList& list, bool transposed,
                      uint32_t multiprocessors) {
  launch_wide<Half>(op, stream, list, transposed, multiprocessors);
}

}  // namespace cog_rwkv

// single/kernel.cuh for float16.
#include "single/launch.cuh"

namespace cog_rwkv {

void launch_single_half(const char* op, cudaStream_t stream, ScalarType state, const Single& p, const SingleCut& cut) {
  launch_single<Half>(op, stream, state, p, cut);
}

}  // namespace cog_rwkv

// single/kernel.cuh for bfloat16.
#include "single/launch.cuh"

namespace cog_rwkv {

void launch_single_bfloat16(const char* op, cudaStream_t stream, ScalarType state, const Single& p,
                            const SingleCut& cut) {
  launch_single<BFloat16>(op, stream, state, p, cut);
}

}  // namespace cog_rwkv

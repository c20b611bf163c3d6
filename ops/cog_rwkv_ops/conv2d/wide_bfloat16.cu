// wide.cuh for bfloat16.
#include "wide_launch.cuh"

namespace cog_rwkv {

template void start_wide_gathers<BFloat16>(const char*, cudaStream_t, const std::vector<Gather<BFloat16>>&,
                                           const ConvPlan&, float*, int64_t);
template void start_wide_weight<BFloat16>(const char*, cudaStream_t, const ConvSizes&, const BFloat16*, const BFloat16*,
                                          BFloat16*, const ConvPlan&, float*);

}  // namespace cog_rwkv

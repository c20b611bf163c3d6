// wide.cuh for float16.
#include "wide_launch.cuh"

namespace cog_rwkv {

template void start_wide_gathers<Half>(const char*, cudaStream_t, const std::vector<Gather<Half>>&, const ConvPlan&,
                                       float*, int64_t);
template void start_wide_weight<Half>(const char*, cudaStream_t, const ConvSizes&, const Half*, const Half*, Half*,
                                      const ConvPlan&, float*);

}  // namespace cog_rwkv

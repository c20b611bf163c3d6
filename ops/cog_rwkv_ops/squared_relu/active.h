// What the CPU kernels of squared_relu_linear take.
#pragma once

#include <cstdint>

namespace cog_rwkv {

// Which neurons of a few tokens are not zero (see kernel.h).
struct ActiveNeurons {
  const int32_t* index;
  const float* value;
  const int32_t* start;
  int64_t count;
};

}  // namespace cog_rwkv

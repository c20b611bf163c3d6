// What the CPU kernel of the weight's gradient takes.
#pragma once

#include "conv2d.h"

namespace cog_rwkv {

// For each place of the kernel along a dimension, the outputs [first, last) that read inside the image.
struct Reach {
  const int64_t *first, *last;
};

struct WeightArgs {
  const ConvSizes* sizes;
  const float *gradient, *x;  // [N, P, Q, K], [N, H, W, C]
  float* out;                 // [K, R, S, C / groups]
  Reach rows, columns;
};

}  // namespace cog_rwkv

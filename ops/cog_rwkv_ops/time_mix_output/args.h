// What the kernels of time_mix_output take.
#pragma once

namespace cog_rwkv {

template <class T>
struct OutputArgs {
  const T *y, *r, *k, *v, *g;        // [tokens, heads, 64]
  const float *r_k, *weight, *bias;  // [heads, 64]
  T* out;                            // like y
  float eps;
};

}  // namespace cog_rwkv

// The way of conv2d on Hopper, wide.cuh: the launches, for Half and for BFloat16, a file each, as there are many
// kernels.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "conv2d.h"
#include "wide_plan.h"

namespace cog_rwkv {

// The steps of 64 terms of a sum.
template <class T>
uint32_t gather_steps(const Gather<T>& a) {
  return static_cast<uint32_t>(a.h.taps * a.w.taps) * divide_up(static_cast<uint32_t>(a.depth), kStepTerms);
}
inline uint32_t weight_steps(const ConvSizes& z) {
  return divide_up(static_cast<uint32_t>(z.n * z.p * z.q), kStepTerms);
}

// `all`: at most kMostGathers gathers into one result of `size` values, each with a depth, in the order of the plan's
// jobs. With several parts they write [parts][size] to `room`, without the bias. On the current device.
template <class T>
void start_wide_gathers(const char* op, cudaStream_t stream, const std::vector<Gather<T>>& all, const ConvPlan& plan,
                        float* room, int64_t size);

// The gradient of a weight, to `out`; with several parts [parts][size of out] to `room`.
template <class T>
void start_wide_weight(const char* op, cudaStream_t stream, const ConvSizes& z, const T* gradient, const T* x, T* out,
                       const ConvPlan& plan, float* room);

}  // namespace cog_rwkv

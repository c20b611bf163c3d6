// Sums and maxima over a warp or a block, in one fixed order: the same input gives the same bits every time.
#pragma once

#include <cuda_runtime.h>

namespace cog_rwkv {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// NaN is passed over where the other is a number.
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// f over the `lanes` lanes that surround each, a power of two; all of them get the result.
template <int lanes = 32, class F>
__device__ __forceinline__ float reduce_lanes(float x, F f) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x = f(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// f over all threads of a block, at most 1024 and a multiple of 32; 0 must be neutral. Every thread calls it, and
// gets the result. `shared` has room for 32; the call ends with nobody reading it.
template <class F>
__device__ __forceinline__ float reduce_block(float x, F f, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = reduce_lanes(x, f);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = reduce_lanes(lane < warps ? shared[lane] : 0.0f, f);
  __syncthreads();
  return x;
}

}  // namespace cog_rwkv

// The formulas of swish, for the CPU's loop and the CUDA kernel alike.
#pragma once

#include "../csrc/math.h"

namespace cog_rwkv {

#if defined(__CUDACC__)
// 1 / (1 + e^-x) from two instructions of the special function unit: with expf and a division, the swish of 16-bit
// numbers takes longer than memory does. To about 3 units in the last place. The inverse has no .ftz: infinity times a
// sigmoid that is all but 0 is infinity.
__device__ __forceinline__ float swish_sigmoid(float x) {
  x = fminf(fmaxf(x, -104.0f), 104.0f);  // a NaN is lost here; the caller multiplies by x once more
  const float high = x * -1.44269504f;
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
  // e^-x = 2^high 2^low, where low is what rounding high to a float left over: 2^low = 1 + low ln 2
  const float low = fmaf(x, -1.92596299e-8f, fmaf(x, -1.44269504f, -high));
  power = fmaf(power, low * 0.693147181f, power);
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}
__device__ __forceinline__ double swish_sigmoid(double x) { return sigmoid(x); }
#else
template <class A>
COG_RWKV_BOTH A swish_sigmoid(A x) {
  return sigmoid(x);
}
#endif

struct Swish {
  template <class A>
  COG_RWKV_BOTH A operator()(A x) const {
    return x * swish_sigmoid(x);
  }
};

// With s = sigmoid(x), the derivative of x s is s + x s (1 - s). Nothing but x is kept from the forward.
struct SwishBackward {
  template <class A>
  COG_RWKV_BOTH A operator()(A gradient, A x) const {
    const A s = swish_sigmoid(x);
    return gradient * (s * (A(1) + x * (A(1) - s)));
  }
};

}  // namespace cog_rwkv

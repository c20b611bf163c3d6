// The formulas of swish, for the CPU's loop and the CUDA kernel alike.
#pragma once

#include "../csrc/math.h"

namespace cog_rwkv {

#if defined(__CUDACC__)
// 1 / (1 + e^-x) from two instructions of the special function unit: with expf and a division, swish takes longer than
// memory does. T is what the result is rounded to.
template <class T>
__device__ __forceinline__ float swish_sigmoid(float x) {
  float power, result;
  if constexpr (sizeof(T) == 2) {  // five digits are plenty; a quarter of the divisor keeps its inverse from being 0
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(power, 0.25f, 0.25f)));
    result *= 0.25f;
  } else {  // to about 3 units in the last place; the inverse has no .ftz: infinity times what is all but 0 is infinity
    x = fminf(fmaxf(x, -104.0f), 104.0f);  // a NaN is lost here; the caller multiplies by x once more
    const float high = x * -1.44269504f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
    // e^-x = 2^high 2^low, where low is what rounding high to a float left over: 2^low = 1 + low ln 2
    const float low = fmaf(x, -1.92596299e-8f, fmaf(x, -1.44269504f, -high));
    power = fmaf(power, low * 0.693147181f, power);
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  }
  return result;
}
template <class T>
__device__ __forceinline__ double swish_sigmoid(double x) {
  return sigmoid(x);
}
#else
template <class T, class A>
COG_RWKV_BOTH A swish_sigmoid(A x) {
  return sigmoid(x);
}
#endif

// For tensors of T.
template <class T>
struct Swish {
  template <class A>
  COG_RWKV_BOTH A operator()(A x) const {
    return x * swish_sigmoid<T>(x);
  }
};

// With s = sigmoid(x), the derivative of x s is s + x s (1 - s). Nothing but x is kept from the forward.
template <class T>
struct SwishBackward {
  template <class A>
  COG_RWKV_BOTH A operator()(A gradient, A x) const {
    const A s = swish_sigmoid<T>(x);
    return gradient * (s * (A(1) + x * (A(1) - s)));
  }
};

}  // namespace cog_rwkv

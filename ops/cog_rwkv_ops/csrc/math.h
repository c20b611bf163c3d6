// exp and sigmoid for the loops of elementwise.h and elementwise.cuh. On the CPU the float version is written
// without branches, calls and tables, so that the compiler turns a loop over it into vector instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define COG_RWKV_BOTH __host__ __device__ __forceinline__
#else
#define COG_RWKV_BOTH __attribute__((always_inline)) inline
#endif

namespace cog_rwkv {

COG_RWKV_BOTH double exponential(double x) { return exp(x); }

#if !defined(__CUDACC__)
COG_RWKV_BOTH float power_of_two(int32_t n) {  // -126 <= n <= 127
  const int32_t bits = (n + 127) << 23;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
#endif

// e^x to about 1 unit in the last place; 0 and infinity where float has nothing between; NaN stays NaN.
COG_RWKV_BOTH float exponential(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  x = x < -104.0f ? -104.0f : x;  // e^-104 rounds to 0, e^89 to infinity
  x = x > 89.0f ? 89.0f : x;
  // x = n ln 2 + r. Adding 1.5 * 2^23 leaves the nearest integer in the low bits (a NaN leaves any: p is NaN then).
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  // Cephes' polynomial for e^r, |r| <= ln(2) / 2 (Moshier, expf.c).
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t n;
  std::memcpy(&n, &shifted, sizeof(n));
  n -= 0x4b400000;
  n = n < -150 ? -150 : n > 129 ? 129 : n;  // only a NaN's n is outside
  const int32_t half = n >> 1;
  return p * power_of_two(half) * power_of_two(n - half);  // in two steps: 2^-150 is no float
#endif
}

// 1 / (1 + e^-x) for float and double.
template <class A>
COG_RWKV_BOTH A sigmoid(A x) {
  return A(1) / (A(1) + exponential(-x));
}

}  // namespace cog_rwkv

// The arithmetic of one id, the same bit for bit on every device: additions, products and divisions that are rounded
// once each (setup.py forbids the host's compiler to fuse them, the intrinsics forbid nvcc), and integers.
#pragma once

#include "../csrc/math.h"

namespace cog_rwkv::sampling {

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }
#else
COG_RWKV_BOTH float plus(float a, float b) { return a + b; }
COG_RWKV_BOTH float times(float a, float b) { return a * b; }
COG_RWKV_BOTH float over(float a, float b) { return a / b; }
COG_RWKV_BOTH uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
COG_RWKV_BOTH float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
#endif

constexpr uint32_t kInfinity = 0x7f800000;  // its bits

COG_RWKV_BOTH bool is_finite(float x) { return (bits_of(x) & kInfinity) != kInfinity; }

// A logit less the penalties for the id's `count`; + 0 makes one zero of two, so that they tie.
COG_RWKV_BOTH float penalised(float logit, float count, float presence, float frequency) {
  const float there = count > 0.0f ? 1.0f : 0.0f;
  return plus(plus(logit, 0.0f), -plus(times(presence, there), times(frequency, count)));
}

// The larger, the likelier; 0 for ids that may not be drawn, and only for them. Floats of one sign are ordered as
// their bits are. A NaN has some place above or below all numbers.
COG_RWKV_BOTH uint32_t order_of(float value, bool allowed) {
  const uint32_t bits = bits_of(value), order = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return allowed ? (order > 1 ? order : 1) : 0;
}

COG_RWKV_BOTH float value_of(uint32_t order) { return float_of(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu)); }

// How far a value lies below the largest, as the bits of a float that is not negative: the smaller, the likelier.
COG_RWKV_BOTH uint32_t distance(float value, float top) { return bits_of(plus(value, -top)) & 0x7fffffff; }

// e^(-distance / temperature) in steps of 2^-44, cut off: from 0 to 2^44. Integers, so that any order of summation
// gives the same bits. The polynomial is that of csrc/math.h.
COG_RWKV_BOTH uint64_t weight(uint32_t distance, float temperature) {
  float x = -fabsf(over(float_of(distance), temperature));  // never above 0, whatever the temperature is
  x = x > -32.0f ? x : -32.0f;                              // e^-32 is less than a step; so is infinity over infinity
  const float shifted = plus(times(x, 1.44269504f), 12582912.0f);
  const float whole = plus(shifted, -12582912.0f);
  const float r = plus(plus(x, -times(whole, 0.693359375f)), times(whole, 2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = plus(times(p, r), 1.3981999507e-3f);
  p = plus(times(p, r), 8.3334519073e-3f);
  p = plus(times(p, r), 4.1665795894e-2f);
  p = plus(times(p, r), 1.6666665459e-1f);
  p = plus(times(p, r), 5.0000001201e-1f);
  p = plus(plus(times(p, times(r, r)), r), 1.0f);
  // p is from 0.7 to 1.42, and whole from -46 to 0: left from -26 to 21, of 24 bits.
  const uint32_t bits = bits_of(p), mantissa = (bits & 0x7fffff) | 0x800000;
  const int32_t power = static_cast<int32_t>(bits_of(shifted)) - 0x4b400000;
  const int32_t left = static_cast<int32_t>(bits >> 23) - 127 + power + 44 - 23;
  return static_cast<uint64_t>(mantissa >> (left < 0 ? -left : 0)) << (left > 0 ? left : 0);
}

COG_RWKV_BOTH uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Where the row's next number from its stream (SplitMix64, 53 bits) lies in [0, total); total is not 0.
COG_RWKV_BOTH uint64_t position(int64_t key, int64_t draws, uint64_t total) {
  const uint64_t number = mix(static_cast<uint64_t>(key) + (static_cast<uint64_t>(draws) + 1) * 0x9e3779b97f4a7c15u);
  const double at = static_cast<double>(number >> 11) * 0x1p-53 * static_cast<double>(total);
  const uint64_t place = static_cast<uint64_t>(at);
  return place < total ? place : total - 1;
}

// The least sum of the likeliest weights that reaches the share top_p of `total`: from 1 to total.
COG_RWKV_BOTH uint64_t wanted_share(double top_p, uint64_t total) {
  const double share = ceil(top_p * static_cast<double>(total));
  if (!(share > 1.0)) return 1;
  return share < static_cast<double>(total) ? static_cast<uint64_t>(share) : total;
}

}  // namespace cog_rwkv::sampling

// The arithmetic of wkv4 on CUDA: the sums of a channel, and what a token reads of them. kernel.h has it for the CPU.
#pragma once

#include "../csrc/fast_math.cuh"

namespace cog_rwkv {

constexpr float kNothing = -1e38f;  // the exponent of sums of nothing

// e^(p - m) and e^(q - m), m the larger of both. One of them is 1, and beside it the error of the other one is nothing:
// x e^-x times what a float is off.
struct Weights4 {
  float p, q;

  __device__ __forceinline__ Weights4(float of_p, float of_q) {
    const float x = of_p - of_q, small = exp2_fast(-1.44269504f * fabsf(x));
    p = x < 0.0f ? small : 1.0f, q = x < 0.0f ? 1.0f : small;
  }
};

// Sums a and b of what a channel has seen, both times e^-p.
struct Sums4 {
  float a, b, p;

  __device__ static Sums4 nothing() { return {0.0f, 0.0f, kNothing}; }

  // Decays by `decay`, and gets what `other` has.
  __device__ __forceinline__ void join(float decay, const Sums4& other) {
    const float decayed = p - decay;
    const Weights4 weights(decayed, other.p);
    a = weights.p * a + weights.q * other.a;
    b = weights.p * b + weights.q * other.b;
    p = fmaxf(decayed, other.p);
  }
};

// What a token reads of the sums before it.
struct Read4 {
  float y, own, q, scale;  // own: its share in the denominator; q: the exponent; scale: 1 / denominator

  __device__ __forceinline__ Read4(const Sums4& s, float u, float k, float v) {
    const Weights4 weights(s.p, u + k);
    q = fmaxf(s.p, u + k);
    own = weights.q;
    scale = reciprocal_fast(weights.p * s.b + own);
    y = (weights.p * s.a + own * v) * scale;
  }
};

}  // namespace cog_rwkv

// The formulas of swish, for the CPU's loop and the CUDA kernel alike.
#pragma once

#include "../csrc/math.h"

namespace cog_rwkv {

struct Swish {
  template <class A>
  COG_RWKV_BOTH A operator()(A x) const {
    return x * sigmoid(x);
  }
};

// With s = sigmoid(x), the derivative of x s is s + x s (1 - s). Nothing but x is kept from the forward.
struct SwishBackward {
  template <class A>
  COG_RWKV_BOTH A operator()(A gradient, A x) const {
    const A s = sigmoid(x);
    return gradient * (s * (A(1) + x * (A(1) - s)));
  }
};

}  // namespace cog_rwkv

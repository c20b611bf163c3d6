// The formulas of binary_activation, for the CPU's loop and the CUDA kernel alike.
#pragma once

#include "../csrc/math.h"

namespace cog_rwkv {

// -1, 0 or 1; the sign of either zero is 0, that of NaN is NaN.
struct BinaryActivation {
  template <class A>
  COG_RWKV_BOTH A operator()(A x) const {
    return x > A(0) ? A(1) : x < A(0) ? A(-1) : x == A(0) ? A(0) : x;
  }
};

// The straight-through estimator: the gradient passes where |x| <= 1, as if the forward had been the identity
// there. A NaN in x passes nothing: every comparison with it is false.
struct BinaryActivationBackward {
  template <class A>
  COG_RWKV_BOTH A operator()(A gradient, A x) const {
    return x >= A(-1) && x <= A(1) ? gradient : A(0);
  }
};

}  // namespace cog_rwkv

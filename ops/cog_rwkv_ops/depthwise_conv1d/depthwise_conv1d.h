// depthwise_conv1d: the checks of its arguments, the same on every device, and the one sum behind it and its gradients.
#pragma once

#include "../csrc/check.h"
#include "../csrc/math.h"

namespace cog_rwkv {

// T values, read from the front or from the back.
template <class T>
struct Line {
  const T* values;
  int64_t size;
  bool reversed;

  COG_RWKV_BOTH float at(int64_t i) const { return static_cast<float>(values[reversed ? size - 1 - i : i]); }
};

// out[t] = sum over u <= t of filter[t - u] * input[u] is what all three need:
//   forward          filter = w reversed,  input = k
//   gradient of k    filter = w reversed,  input = gradient reversed,  out reversed
//   gradient of w    filter = k,           input = gradient reversed,  summed over the batch
struct Conv {
  int64_t batch, channels, time;
  bool input_reversed, out_reversed;
  float eps;
};

inline void check_signal(const char* op, const char* name, const Tensor& t) {
  check_float_or_half(op, name, t);
  check_dim(op, name, t, 3, "[B, C, T]");
}

inline void check_filter(const char* op, const Tensor& w, const char* as_name, const Tensor& as) {
  check_same_dtype(op, "w", w, as_name, as);
  check_device(op, "w", w, as_name, as);
  check_shape(op, "w", w, {as.size(1), as.size(2)}, "[C, T] as in [B, C, T]");
}

}  // namespace cog_rwkv

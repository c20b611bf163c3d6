// The check of tensors whose shapes have nothing to do with each other.
#pragma once

#include "check.h"

namespace cog_rwkv {

// Same device and dtype.
inline void check_beside(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  check_device(op, name, t, as_name, as);
  check_same_dtype(op, name, t, as_name, as);
}

}  // namespace cog_rwkv

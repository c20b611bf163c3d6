// What kernels ask for that copy 16 bytes at a time and fill the device by themselves.
#pragma once

#include "cuda.cuh"
#include "tensor.h"

namespace cog_rwkv {

// Contiguous and on a 16-byte boundary, where a view may begin anywhere.
inline Tensor as_aligned(const Tensor& t) {
  const Tensor contiguous = as_contiguous(t);
  if (aligned16(contiguous.const_data_ptr())) return contiguous;
  Tensor copy = empty_tensor(t, t.sizes());
  torch::stable::copy_(copy, contiguous);
  return copy;
}

// Of the current device.
inline int device_attribute(const char* op, cudaDeviceAttr which) {
  int id = 0, value = 0;
  check_cuda(op, cudaGetDevice(&id));
  check_cuda(op, cudaDeviceGetAttribute(&value, which, id));
  return value;
}

}  // namespace cog_rwkv

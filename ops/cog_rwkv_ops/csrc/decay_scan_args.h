// What one scan of decay_scan.h reads and writes on CUDA.
#pragma once

#include <cstdint>

namespace cog_rwkv {

constexpr int kWide = 64;  // rows and columns of M

template <class T>
struct Scan {
  const T *p, *q, *x;  // [batch, tokens, heads, 64]
  const void* w;       // the same, or [heads, 64] in float32
  const float* u;      // [heads, 64]
  const float* begin;  // [batch, heads, 64, 64] as [value, key]: M, or its transpose where rows decay
  float* end;          // the same, or null; token by token in the order of M
  T* out;              // like p
  int64_t tokens, heads;
  // Where rows (keys) decay: what gives the gradients of u and w.
  const T* z;         // like p: what p is not of r and k
  float* product;     // [batch, tokens, heads, 64]: r d_r without the bonus: written by one scan, read by the other
  const float* last;  // [batch, heads, 64, 64]: the state after the last token, as the scan of d_r left it in `end`
  float* d_u;         // [batch, heads, 64]
  T* d_w;             // like p
  float* d_w_sum;     // [batch, heads, 64], where w is constant
};

// `rows` decay or columns do; `reverse`: from the last token to the first; `constant`: w is the same for every token.
template <bool rows_, bool reverse_, bool constant_>
struct ScanKind {
  static constexpr bool rows = rows_, reverse = reverse_, constant = constant_;
};

}  // namespace cog_rwkv

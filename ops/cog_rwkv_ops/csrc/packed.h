// Packed sequences: N tokens of B sequences, one after the other; sequence i is tokens cu_seqlens[i] to
// cu_seqlens[i + 1], and its state is row rows[i] of a pool.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"
#include "dtype.h"

namespace cog_rwkv {

// What holds on every device: types, shapes, places. `x` is the tensor of N tokens that they must fit.
inline void check_packed(const char* op, const Tensor& rows, const Tensor& cu_seqlens, const Tensor& x) {
  check_dtype(op, "rows", rows, {ScalarType::Long});
  check_device(op, "rows", rows, "x", x);
  check_dim(op, "rows", rows, 1, "[B]");
  check_dtype(op, "cu_seqlens", cu_seqlens, {ScalarType::Long});
  check_device(op, "cu_seqlens", cu_seqlens, "x", x);
  check_shape(op, "cu_seqlens", cu_seqlens, {rows.size(0) + 1}, "[B + 1] with B as in rows");
}

// What the CPU can look at: the values. On CUDA that would make the host wait for the device.
inline void check_packed_values(const char* op, const int64_t* rows, const int64_t* cu_seqlens, int64_t batch,
                                int64_t tokens, int64_t pool_rows) {
  if (cu_seqlens[0] != 0)
    fail(op, "cu_seqlens begins with " + std::to_string(cu_seqlens[0]) + "; it must begin with 0");
  for (int64_t i = 0; i < batch; i++) {
    if (cu_seqlens[i + 1] < cu_seqlens[i]) {
      fail(op,
           "cu_seqlens decreases from " + std::to_string(cu_seqlens[i]) + " to " + std::to_string(cu_seqlens[i + 1]));
    }
    if (rows[i] < 0 || rows[i] >= pool_rows) {
      fail(op, "rows has " + std::to_string(rows[i]) + "; the pool has rows 0 to " + std::to_string(pool_rows - 1));
    }
  }
  if (cu_seqlens[batch] != tokens) {
    fail(op, "cu_seqlens ends with " + std::to_string(cu_seqlens[batch]) + "; it must end with the number of tokens, " +
                 std::to_string(tokens));
  }
  if (batch < 2) return;
  std::vector<int64_t> sorted(rows, rows + batch);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail(op, "rows has " + std::to_string(*twice) + " twice; each must be another row");
}

// `pool` is [R, ...], written in place: each row contiguous, the rows anywhere. Its stride is returned.
inline int64_t check_pool(const char* op, const char* name, const Tensor& pool) {
  int64_t expected = 1;
  for (int64_t d = pool.dim() - 1; d > 0; d--) {
    if (pool.size(d) != 1 && pool.stride(d) != expected) {
      fail(op, std::string(name) + " must have contiguous rows: it is written in place");
    }
    expected *= pool.size(d);
  }
  if (pool.size(0) > 1 && pool.stride(0) < expected) {
    fail(op, std::string(name) + " must not overlap itself: it is written in place");
  }
  return pool.stride(0);
}

}  // namespace cog_rwkv

// Packed sequences on the device, where nobody has checked the values: what is out of range is skipped.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cog_rwkv {

// Sequence i: its tokens and its row of the pool.
struct Sequence {
  int64_t begin, end, row;
  bool row_ok;
};

// Without tokens where cu_seqlens makes no sense there.
__device__ inline Sequence sequence_at(const int64_t* rows, const int64_t* cu_seqlens, int64_t i, int64_t tokens,
                                       int64_t pool_rows) {
  Sequence s{cu_seqlens[i], cu_seqlens[i + 1], rows[i], false};
  s.row_ok = s.row >= 0 && s.row < pool_rows;
  if (s.begin < 0 || s.end > tokens || s.end < s.begin) s.begin = s.end = 0;
  return s;
}

// The sequence that holds token t; -1 where there is none.
__device__ inline int64_t sequence_of(const int64_t* cu_seqlens, int64_t batch, int64_t t) {
  int64_t low = 0, high = batch;  // the last i with cu_seqlens[i] <= t lies in [low, high]
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low < batch && cu_seqlens[low] <= t && t < cu_seqlens[low + 1] ? low : -1;
}

}  // namespace cog_rwkv

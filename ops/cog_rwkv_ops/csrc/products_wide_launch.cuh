// The launch of products_wide.cuh's kernels, for one type of weights.
#pragma once

#include "products_wide.cuh"
#include "products_wide.h"

namespace cog_rwkv {

template <class T, class S, bool transposed>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, uint32_t blocks) {
  const auto kernel = wide_kernel<T, S, transposed>;
  launch_chained(op, stream, kernel, dim3(std::min(list.plan.first[kMaxProducts], blocks)), dim3(kWideThreads),
                 S::bytes, list);
}

template <class T, class S>
bool launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t blocks) {
  if (list.plan.tile.rows != S::ROWS || list.plan.tile.tokens != S::TOKENS) return false;
  if (transposed) {
    launch_wide<T, S, true>(op, stream, list, blocks);
  } else {
    launch_wide<T, S, false>(op, stream, list, blocks);
  }
  return true;
}

template <class T, size_t... I>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t blocks,
                 std::index_sequence<I...>) {
  const bool done =
      (launch_wide<T, WideShape<kTileSizes[I].rows, kTileSizes[I].tokens>>(op, stream, list, transposed, blocks) ||
       ...);
  if (!done) fail(op, "there is no kernel for a tile of this size");
}

template <class T>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t blocks) {
  launch_wide<T>(op, stream, list, transposed, blocks, std::make_index_sequence<std::size(kTileSizes)>{});
}

}  // namespace cog_rwkv

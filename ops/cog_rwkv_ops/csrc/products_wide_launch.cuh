// The launch of products_wide.cuh's kernels, for one type of weights.
#pragma once

#include "products_wide.cuh"
#include "products_wide.h"

namespace cog_rwkv {

template <class T, class S, bool transposed>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, uint32_t multiprocessors) {
  const auto kernel = wide_kernel<T, S, transposed>;
  const uint32_t blocks = blocks_of(list.plan, multiprocessors, S::small ? 2 : 1);
  // Blocks that are one for each multiprocessor might else meet on those that the kernel before has left.
  const uint32_t bytes = S::small && blocks <= multiprocessors ? kAloneBytes : S::bytes;
  launch_chained(op, stream, kernel, dim3(blocks), dim3(kWideThreads), bytes, list);
}

template <class T, class S>
bool launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors) {
  if (list.plan.tile.rows != S::ROWS || list.plan.tile.tokens != S::TOKENS) return false;
  if (transposed) {
    launch_wide<T, S, true>(op, stream, list, multiprocessors);
  } else {
    launch_wide<T, S, false>(op, stream, list, multiprocessors);
  }
  return true;
}

template <class T, size_t... I>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors,
                 std::index_sequence<I...>) {
  const bool done = (launch_wide<T, WideShape<kTileSizes[I].rows, kTileSizes[I].tokens>>(op, stream, list, transposed,
                                                                                         multiprocessors) ||
                     ...);
  if (!done) fail(op, "there is no kernel for a tile of this size");
}

template <class T>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors) {
  launch_wide<T>(op, stream, list, transposed, multiprocessors, std::make_index_sequence<std::size(kTileSizes)>{});
}

}  // namespace cog_rwkv

// The launch of products_wide.cuh's kernels, for one type of weights.
#pragma once

#include "products_wide.cuh"
#include "products_wide.h"

namespace cog_rwkv {

template <class T, class S, bool transposed>
void launch_blocks(const char* op, cudaStream_t stream, const WideList& list, uint32_t blocks, uint32_t bytes) {
  launch_chained(op, stream, wide_kernel<T, S, transposed>, dim3(blocks), dim3(kWideThreads), bytes, list);
}

template <class T, int ROWS, int TOKENS, bool transposed>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, uint32_t multiprocessors) {
  using S = WideShape<ROWS, TOKENS>;
  const uint32_t blocks = blocks_of(list.plan, multiprocessors, S::light ? 2 : 1);
  if constexpr (S::light) {
    using Small = WideShape<ROWS, TOKENS, true>;
    if (blocks > multiprocessors) return launch_blocks<T, Small, transposed>(op, stream, list, blocks, Small::bytes);
    // A short ring where a longer one would not be filled; but blocks that are one for each multiprocessor might meet
    // on those that the kernel before has left.
    const uint32_t steps = divide_up(steps_of(static_cast<uint32_t>(list.jobs[0].k)), list.plan.parts);
    if (list.plan.first[kMaxProducts] <= blocks && steps <= Small::STAGES) {
      return launch_blocks<T, Small, transposed>(op, stream, list, blocks, kAloneBytes);
    }
  }
  launch_blocks<T, S, transposed>(op, stream, list, blocks, S::bytes);
}

template <class T, int ROWS, int TOKENS>
bool launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors) {
  if (list.plan.tile.rows != ROWS || list.plan.tile.tokens != TOKENS) return false;
  if (transposed) {
    launch_wide<T, ROWS, TOKENS, true>(op, stream, list, multiprocessors);
  } else {
    launch_wide<T, ROWS, TOKENS, false>(op, stream, list, multiprocessors);
  }
  return true;
}

template <class T, size_t... I>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors,
                 std::index_sequence<I...>) {
  const bool done =
      (launch_wide<T, kTileSizes[I].rows, kTileSizes[I].tokens>(op, stream, list, transposed, multiprocessors) || ...);
  if (!done) fail(op, "there is no kernel for a tile of this size");
}

template <class T>
void launch_wide(const char* op, cudaStream_t stream, const WideList& list, bool transposed, uint32_t multiprocessors) {
  launch_wide<T>(op, stream, list, transposed, multiprocessors, std::make_index_sequence<std::size(kTileSizes)>{});
}

}  // namespace cog_rwkv

// The barrier of a grid whose blocks all run at once, in two halves: between them a block may read what was there
// before.
#pragma once

#include "signals.cuh"

namespace cog_rwkv {

// Goes on for ever. Between barriers it is a multiple of the blocks of the grid, so that the first one of a kernel
// finds out where it is, and nothing has to be set back. Two grids that fill the device do not run at once.
static __device__ uint64_t grid_counter;

// By the readers of each block.
class GridBarrier {
 public:
  // What the block's readers wrote before is there for all who have waited.
  __device__ __forceinline__ void arrive() {
    sync_readers();
    if (threadIdx.x != 0) return;
    if (least_ == 0) {
      least_ = (count_and_ask(&grid_counter) / gridDim.x + 1) * gridDim.x;
    } else {
      count(&grid_counter);
      least_ += gridDim.x;
    }
  }

  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) wait_for_count(&grid_counter, least_);
    sync_readers();
  }

 private:
  uint64_t least_ = 0;
};

}  // namespace cog_rwkv

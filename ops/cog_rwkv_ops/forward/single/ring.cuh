// The ring through which all weights of a step come into a block's shared memory, in the order in which they are
// needed. No weight depends on an activation, so the one thread that copies never waits for a barrier of the grid, and
// runs ahead as far as there is room.
//
// Copies are counted through the whole step; copy i is for warp i % 8 alone, and lies in slot i % kSlots. A slot is so
// always the same warp's, and a warp is never a turn of the ring behind another.
#pragma once

#include "plan.h"
#include "signals.cuh"

namespace cog_rwkv {

constexpr uint32_t kReadingWarps = kReaders / 32;
static_assert(kSlots % kReadingWarps == 0);

struct Ring {
  alignas(128) unsigned char slots[kSlots][kSlotBytes];
  uint64_t full[kSlots], empty[kSlots];
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void make_ring(Ring& ring) {
  for (uint32_t i = 0; i < kSlots; i++) make_barrier(&ring.full[i]), make_barrier(&ring.empty[i]);
  tell_of_barriers();
}

// The thread that copies.
class Copier {
 public:
  __device__ __forceinline__ Copier(const Single& p, Ring& ring) : p_(p), ring_(ring) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t i = 0; i < places(p_); i++) {
      const Place at = place_at(p_, i);
      if (at.stage == kKeyStage && p_.values_ahead) fetch_values(at.layer);
      each_part(p_, at.stage, at.layer, blockIdx.x, gridDim.x, [&](const StagePart& part) { copy(part.part); });
      if (at.stage != kFirstStage || blockIdx.x >= p_.c / 64) continue;
#pragma unroll 1
      for (uint32_t job = 0; job < second_jobs(at.layer); job++) copy(second_part(p_, at.layer, job, blockIdx.x));
    }
  }

 private:
  __device__ __forceinline__ void copy(Part part) {
#pragma unroll 1
    while (part.rows > 0) {
      const uint32_t slot = next_ % kSlots, rows = min(part.rows, part.at_once), bytes = rows * part.row_bytes;
      if (next_ >= kSlots) wait_at(&ring_.empty[slot], (next_ / kSlots - 1) & 1);
      expect_bytes(&ring_.full[slot], bytes);
      copy_in(ring_.slots[slot], part.from, bytes, &ring_.full[slot]);
      part.from += bytes, part.rows -= rows, next_++;
    }
  }

  __device__ __forceinline__ void fetch_values(uint32_t layer) {
    const Range rows = share_of(p_.ffn, blockIdx.x, gridDim.x);
    const uint32_t row_bytes = p_.c * 2;
    const unsigned char* from = bytes_at(p_.layers[layer].value_t, uint64_t{rows.begin} * row_bytes);
#pragma unroll 1
    for (uint32_t row = rows.begin; row < rows.end; row++, from += row_bytes) fetch_to_l2(from, row_bytes);
  }

  const Single& p_;
  Ring& ring_;
  uint32_t next_ = 0;
};

// A warp that reads. All eight go through the same parts.
class RingReader {
 public:
  __device__ __forceinline__ explicit RingReader(Ring& ring) : ring_(ring) {}

  // Calls f(address of the first row, its number in the part, how many) for each copy of a part that is this warp's.
  template <class F>
  __device__ __forceinline__ void read(const Part& part, uint32_t copies, F f) {
    const uint32_t warp = threadIdx.x / 32;
#pragma unroll 1
    for (uint32_t i = (warp - next_) % kReadingWarps; i < copies; i += kReadingWarps) {
      const uint32_t copy = next_ + i, slot = copy % kSlots, first = i * part.at_once;
      wait_at(&ring_.full[slot], copy / kSlots & 1);
      f(static_cast<const unsigned char*>(ring_.slots[slot]), first, min(part.at_once, part.rows - first));
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_at(&ring_.empty[slot]);
    }
    next_ += copies;
  }

 private:
  Ring& ring_;
  uint32_t next_ = 0;
};

}  // namespace cog_rwkv

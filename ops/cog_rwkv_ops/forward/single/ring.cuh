// The ring through which all weights of a step come into a block's shared memory, in the order in which they are
// needed. No weight depends on an activation, so the one thread that copies never waits for a barrier of the grid, and
// runs ahead as far as there is room.
//
// Copies are counted through the whole step; copy i is for warp i % 8 alone, and lies in slot i % kSlots. A slot is so
// always the same warp's, and a warp is never a turn of the ring behind another.
#pragma once

#include "../../csrc/bulk.cuh"
#include "../../csrc/cluster.cuh"
#include "plan.h"
#include "signals.cuh"

namespace cog_rwkv {

// Where the token's state is.
struct TokenRow {
  int64_t row;
  bool ok;  // else it has none; -1 is padding, which must not harm, and all else gives NaN

  __device__ __forceinline__ explicit TokenRow(const Single& p)
      : row(*p.row), ok(static_cast<uint64_t>(row) < static_cast<uint64_t>(p.pool_rows)) {}
  __device__ __forceinline__ float nothing() const { return row == -1 ? 0.0f : nanf(""); }
};

constexpr uint32_t kReadingWarps = kReaders / 32;
static_assert(kSlots % kReadingWarps == 0);

struct Ring {
  alignas(128) unsigned char slots[kSlots][kSlotBytes];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t asked;  // once a layer: the block's value rows are on their way
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void make_ring(Ring& ring) {
  for (uint32_t i = 0; i < kSlots; i++) init_barrier(&ring.full[i], 1), init_barrier(&ring.empty[i], 32);
  init_barrier(&ring.asked, 32);
  tell_of_barriers();
}

// The thread that copies. Behind all the copies that it has under way, what somebody asks of the device's memory waits
// for microseconds. So it brings the small vectors and the states of a stage into L2 before the weights of that stage,
// and does not begin with a layer before the value rows of the one before have been asked for.
class Copier {
 public:
  __device__ __forceinline__ Copier(const Single& p, Ring& ring) : p_(p), ring_(ring), token_(p) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t i = 0; i < places(p_); i++) {
      const Place at = place_at(p_, i);
      if (i % 3 == 0 && i != 0 && !p_.values_ahead) wait_at(&ring_.asked, (at.layer - 1) & 1);
      fetch_small(at);
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

  __device__ __forceinline__ void fetch_small(const Place& at) {
    if (at.stage == kFirstStage) {
      touch(p_.layers[at.layer]);
      fetch_norm(at.layer, 0, 6);
      if (blockIdx.x < p_.c / 64) fetch_head(p_.layers[at.layer], at.layer);
    } else if (at.stage == kKeyStage) {
      fetch_norm(at.layer, 1, 1);
    }
  }

  // The kernel's arguments, too, come from memory: this brings a layer's pointers into the multiprocessor's cache. None
  // is odd.
  static __device__ __forceinline__ void touch(const SingleLayer& layer) {
    const auto* words = reinterpret_cast<const uint64_t*>(&layer);
    uint64_t any = 0;
#pragma unroll
    for (uint32_t i = 0; i < sizeof(SingleLayer) / sizeof(uint64_t); i += 4) any |= words[i];
    if (any % 2 != 0) __trap();
  }

  // A row of C floats a block.
  __device__ __forceinline__ void fetch_norm(uint32_t layer, uint32_t half, uint32_t mixes) {
    const SingleLayer& l = p_.layers[layer];
#pragma unroll 1
    for (uint32_t i = blockIdx.x; i < mixes + 3; i += gridDim.x) {
      const float* from = l.mix[half] + i * p_.c;
      if (i == mixes) from = l.norm_weight[half];
      if (i == mixes + 1) from = l.norm_bias[half];
      if (i == mixes + 2) {
        if (!token_.ok) continue;
        from = p_.shift + ((2 * int64_t{layer} + half) * p_.pool_rows + token_.row) * p_.c;
      }
      fetch_to_l2(from, p_.c * 4);
    }
  }

  __device__ __forceinline__ void fetch_head(const SingleLayer& l, uint32_t layer) {
    const float* const small[] = {l.w0, l.a0, l.k_k, l.k_a, l.r_k, l.group_weight, l.group_bias, l.v0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (small[i] != nullptr) fetch_to_l2(small[i] + blockIdx.x * 64, 64 * sizeof(float));
    }
    if (!token_.ok) return;
    const uint64_t head = (uint64_t{layer} * p_.pool_rows + token_.row) * (p_.c / 64) + blockIdx.x;
    fetch_to_l2(bytes_at(p_.wkv, head * p_.head_bytes), p_.head_bytes);
  }

  const Single& p_;
  Ring& ring_;
  const TokenRow token_;
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
      arrive(&ring_.empty[slot]);
    }
    next_ += copies;
  }

 private:
  Ring& ring_;
  uint32_t next_ = 0;
};

}  // namespace cog_rwkv

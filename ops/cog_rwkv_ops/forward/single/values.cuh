// The value rows of the neurons whose keys a block has: those that are not zero are read, and their sum is added to
// that of the other blocks.
#pragma once

#include "norm.cuh"
#include "vector.cuh"

namespace cog_rwkv {

struct ValueMemory {
  float keys[kMostRows];                     // of the block's neurons
  alignas(16) float list[kMostRows + 16];    // those that are not zero, in their order,
  alignas(16) uint32_t row[kMostRows + 16];  // and their numbers in the block
  uint32_t count;
};

// V as in WarpVector. A thread has neighbouring columns.
template <class W, int V>
class Values {
  static constexpr int kColumns = V, kBatch = 16;

 public:
  __device__ __forceinline__ Values(const Single& p, ValueMemory& memory, Range neurons)
      : p_(p), memory_(memory), neurons_(neurons) {}

  __device__ __forceinline__ void fetch(const void* value_t, uint32_t neuron) const {
    fetch_to_l2(bytes_at(value_t, uint64_t{neurons_.begin + neuron} * p_.c * 2), p_.c * 2);
  }

  __device__ __forceinline__ uint32_t first() const { return neurons_.begin; }

  // Once the keys are there for all readers. `sums`: room for [C].
  __device__ __forceinline__ void add(const void* value_t, float* sums) const {
    if (threadIdx.x < 32) list_active();
    sync_readers();
    float sum[kColumns] = {};
    const uint32_t count = memory_.count, column = threadIdx.x * static_cast<uint32_t>(kColumns);
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += kBatch) add_batch(sum, value_t, i, count);
#pragma unroll
    for (int j = 0; j < kColumns && column < p_.c; j += 4) {
      *reinterpret_cast<float4*>(sums + column + j) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
    }
    sync_readers();
    if (count == 0) return;
    uint64_t* const to = p_.sums + blockIdx.x % kSumCopies<V> * p_.c;
#pragma unroll 4
    for (uint32_t c = threadIdx.x; c < p_.c; c += kReaders) {
      const float v = sums[c];
      if (fabsf(v) < kFixedMost) {
        add_to(to + c, static_cast<uint64_t>(__float2ll_rn(v * kFixedScale)));
      } else {
        add_to(p_.bad, 1);
      }
    }
  }

 private:
  // By one warp.
  __device__ __forceinline__ void list_active() const {
    const uint32_t lane = threadIdx.x % 32, all = neurons_.end - neurons_.begin;
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < all; first += 32) {
      const uint32_t i = first + lane;
      const float key = i < all ? memory_.keys[i] : 0.0f;
      const uint32_t active = __ballot_sync(kAllLanes, key != 0.0f),
                     place = count + __popc(active & ((1u << lane) - 1));
      if (key != 0.0f) memory_.list[place] = key, memory_.row[place] = i;
      count += __popc(active);
    }
    if (lane == 0) memory_.count = count;
  }

  __device__ __forceinline__ void add_batch(float (&sum)[kColumns], const void* value_t, uint32_t first,
                                            uint32_t count) const {
    const uint32_t column = threadIdx.x * static_cast<uint32_t>(kColumns);
    uint32_t words[kBatch][kColumns / 2] = {}, row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) row[i] = memory_.row[first + i];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (first + i >= count || column >= p_.c) break;
      read_once(words[i], bytes_at(value_t, (uint64_t{neurons_.begin + row[i]} * p_.c + column) * 2));
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const float key = first + i < count ? memory_.list[first + i] : 0.0f;
#pragma unroll
      for (int j = 0; j < kColumns / 2; j++) {
        const float2 two = pair_in<W>(words[i][j]);
        sum[2 * j] = fmaf(key, two.x, sum[2 * j]), sum[2 * j + 1] = fmaf(key, two.y, sum[2 * j + 1]);
      }
    }
  }

  const Single& p_;
  ValueMemory& memory_;
  const Range neurons_;
};

}  // namespace cog_rwkv

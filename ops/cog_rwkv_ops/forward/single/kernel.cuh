// The kernel: a step of one token, as plan.h says. A warp copies weights, eight compute.
#pragma once

#include "../../csrc/fast_math.cuh"
#include "../../csrc/tma.cuh"
#include "head.cuh"
#include "values.cuh"

namespace cog_rwkv {

// In dynamic shared memory, kFixedBytes at most; the vectors of a stage follow, W [2 or more, C].
struct SingleMemory {
  Ring ring;
  HeadMemory head;
  ValueMemory values;
  alignas(16) float4 moments[kReadingWarps];
  StageParts parts;
  float stream[kMostRows];  // of the block's rows of the output projection
};

// The eight warps.
template <class W, class S, int V>
class Reader {
 public:
  __device__ __forceinline__ Reader(const Single& p, SingleMemory& memory)
      : p_(p),
        memory_(memory),
        vectors_(reinterpret_cast<W*>(&memory + 1)),
        token_(p),
        ring_(memory.ring),
        norm_(p, token_),
        outputs_(share_of(p.rows[kOutputStage], blockIdx.x, gridDim.x)),
        values_(p, memory.values, share_of(p.rows[kKeyStage], blockIdx.x, gridDim.x)) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t i = 0; i < places(p_); i++) {
      const Place at = place_at(p_, i);
      if (at.stage == kOutputStage) {
        read_gated(at);
      } else {
        norm_.run(at, barrier_, memory_.parts, memory_.moments, vectors_);
      }
#pragma unroll 1
      for (uint32_t part = 0; part < memory_.parts.count; part++) multiply(at, part);
      if (at.stage == kHeadStage) return;
      if (at.stage == kFirstStage) run_head(at.layer);
      if (at.stage == kKeyStage) add_values(p_.layers[at.layer].value_t);
      barrier_.arrive();
    }
  }

 private:
  __device__ __forceinline__ void multiply(const Place& at, uint32_t number) {
    const WarpVector<W, V> x(vectors_ + number * p_.c, p_.c);
    const StagePart part = memory_.parts.list[number];
    ring_.read(part.part, part.copies,
               [&](const unsigned char* from, uint32_t first, uint32_t count) __attribute__((always_inline)) {
                 x.multiply(from, count, [&](uint32_t r, float sum) __attribute__((always_inline)) {
                   finish(at.stage, at.layer, part.job, part.row + first + r, sum);
                 });
               });
  }

  __device__ __forceinline__ void add_values(const void* value_t) {
    sync_readers();
    if (threadIdx.x < 32) arrive(&memory_.ring.asked);
    values_.add(value_t, reinterpret_cast<float*>(vectors_));
  }

  __device__ __forceinline__ void run_head(uint32_t layer) {
    barrier_.arrive();
    if (blockIdx.x < p_.c / kHead) {
      HeadStage<W, S> head(p_, token_, layer, memory_.head);
      end_first();
      head.run(ring_, vectors_);
    } else {
      end_first();
    }
  }

  __device__ __forceinline__ void end_first() {
    barrier_.wait();
    norm_.write_shift();
    norm_.clear_sums();
  }

  // What the output projection multiplies, and the residual stream of the block's rows, which was there before.
  __device__ __forceinline__ void read_gated(const Place& at) {
    list_parts(p_, at, memory_.parts);
    if (threadIdx.x < outputs_.end - outputs_.begin) {
      memory_.stream[threadIdx.x] = __ldcg(p_.stream + outputs_.begin + threadIdx.x);
    }
    barrier_.wait();
    const auto* from = static_cast<const uint4*>(p_.gated);
    for (uint32_t i = threadIdx.x; i < p_.c / 8; i += kReaders) {
      reinterpret_cast<uint4*>(vectors_)[i] = __ldcg(from + i);
    }
    sync_readers();
  }

  // A row's product, by one lane.
  __device__ __forceinline__ void finish(uint32_t stage, uint32_t layer, uint32_t job, uint32_t row, float sum) {
    if (stage == kHeadStage) {
      p_.logits[row] = sum;
    } else if (stage == kOutputStage) {
      p_.middle[row] = memory_.stream[row - outputs_.begin] + sum;
    } else if (stage == kKeyStage) {
      const uint32_t neuron = row - values_.first();
      memory_.values.keys[neuron] = sum <= 0.0f ? 0.0f : sum * sum;  // NaN stays
      if (!p_.values_ahead && !(sum <= 0.0f)) values_.fetch(p_.layers[layer].value_t, neuron);
    } else {
      if (job == 3 + kGateRank) sum = sigmoid_fast(sum);
      if (job == 3 + kDecayRank) sum = 2.0f * sigmoid_fast(2.0f * sum) - 1.0f;  // tanh
      static_cast<W*>(p_.projected)[row] = static_cast<W>(sum);
    }
  }

  const Single& p_;
  SingleMemory& memory_;
  W* const vectors_;
  const TokenRow token_;
  RingReader ring_;
  GridBarrier barrier_;
  RowNorm<W, V> norm_;
  const Range outputs_;
  const Values<W, V> values_;
};

// V: pieces of 256 channels, at most.
template <class W, class S, int V>
__global__ void __launch_bounds__(kReaders + 32, 1) single_kernel(const __grid_constant__ Single p) {
#if COG_RWKV_WGMMA
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& memory = *reinterpret_cast<SingleMemory*>(bytes);
  if (threadIdx.x == 0) make_ring(memory.ring);
  __syncthreads();
  if (threadIdx.x < kReaders) {
    Reader<W, S, V>(p, memory).run();
  } else if (elected()) {  // else the compiler puts a loop around every copy
    Copier(p, memory.ring).run();
  }
#endif
}

}  // namespace cog_rwkv

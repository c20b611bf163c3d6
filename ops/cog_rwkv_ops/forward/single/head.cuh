// The second stage of a layer: all that happens inside a head, by one block.
#pragma once

#include "../heads.cuh"
#include "norm.cuh"
#include "ring.cuh"
#include "vector.cuh"

namespace cog_rwkv {

struct HeadMemory {
  alignas(16) float in[6][kHead];  // as work.cuh numbers them
  float y[kHead];
  alignas(16) uint16_t made[kRankJobs][kHead];  // W: second halves
  StagePart second[kSecondJobs];
};

template <class W, class S>
class HeadStage {
 public:
  // Reads ahead what does not depend on the first stage.
  __device__ __forceinline__ HeadStage(const Single& p, const TokenRow& token, uint32_t layer, HeadMemory& memory)
      : p_(p), token_(token), memory_(memory), layer_(layer), channel_(blockIdx.x * kHead + threadIdx.x % 32 * 2) {
    const SingleLayer& l = p.layers[layer];
    step_.v_mix = layer == 0 ? nullptr : static_cast<const W*>(p.first);  // only whether it is null matters
    step_.v_first = static_cast<W*>(p.first);
    step_.w0 = l.w0, step_.a0 = l.a0, step_.v0 = l.v0, step_.k_k = l.k_k, step_.k_a = l.k_a, step_.r_k = l.r_k;
    step_.weight = l.group_weight, step_.bias = l.group_bias;
    state_ = static_cast<S*>(p.wkv) +
             ((int64_t{layer} * p.pool_rows + token.row) * (p.c / kHead) + blockIdx.x) * (kHead * kHead) +
             StatePieces<S>::offset(threadIdx.x);
    if (token.ok) pieces_.load(state_);
    if (first_warp()) weights_.load(step_, channel_);
    if (threadIdx.x < second_jobs(layer)) {
      const Part part = second_part(p, layer, threadIdx.x, blockIdx.x);
      memory.second[threadIdx.x] = {part, part.copies(), threadIdx.x, 0};
    }
  }

  // Once the first stage is there. `hidden`: room for the first halves.
  __device__ __forceinline__ void run(RingReader& ring, W* hidden) {
    const uint32_t all = p_.all_ranks - (layer_ == 0 ? p_.ranks[kMixRank] : 0);
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const W*>(p_.projected) + 3 * p_.c);
    for (uint32_t i = threadIdx.x; i < all / 8; i += kReaders) reinterpret_cast<uint4*>(hidden)[i] = __ldcg(from + i);
    HeadInputs<W> inputs{};
    if (first_warp()) {
      const auto bits = [&](const void* of, uint32_t row) {
        return __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const W*>(of) + row * p_.c + channel_));
      };
      inputs.r = bits(p_.projected, 0), inputs.k = bits(p_.projected, 1), inputs.v = bits(p_.projected, 2);
      if (layer_ != 0) inputs.v_first = bits(p_.first, 0);
    }
    sync_readers();
    W* const made = reinterpret_cast<W*>(memory_.made);
    const W* at = hidden;
#pragma unroll 1
    for (uint32_t job = 0; job < second_jobs(layer_); job++) {
      multiply(ring, memory_.second[job], at, made + job * kHead);
      at += p_.ranks[job];
    }
    sync_readers();
    HeadEnd end{};
    if (first_warp()) {
      const Ranks<W> ranks{made, 1};
      inputs.w = ranks.bits(kDecayRank, 0), inputs.a = ranks.bits(kRateRank, 0), inputs.g = ranks.bits(kGateRank, 0);
      if (layer_ != 0) inputs.v_mix = ranks.bits(kMixRank, 0);
      end = prepare_head(step_, weights_, inputs, memory_.in, channel_);
    }
    sync_readers();
    recur(memory_);
    sync_readers();
    if (first_warp()) finish_head(weights_, end, memory_.y, 64e-5f, static_cast<W*>(p_.gated) + channel_);
  }

 private:
  static __device__ __forceinline__ bool first_warp() { return threadIdx.x < 32; }

  // Four lanes two rows. A rank is a multiple of 32.
  __device__ __forceinline__ void multiply(RingReader& ring, const StagePart& second, const W* hidden, W* made) const {
    const Part part = second.part;
    const uint32_t lane = threadIdx.x % 32, pieces = part.row_bytes / 16;
    const auto* right = reinterpret_cast<const Words*>(hidden);
    ring.read(part, second.copies,
              [&](const unsigned char* rows, uint32_t first, uint32_t count) __attribute__((always_inline)) {
#pragma unroll 1
                for (uint32_t r = 0; r < count; r += 16) {
                  const unsigned char* left[2];
                  float2 sums[2] = {};
#pragma unroll
                  for (int half = 0; half < 2; half++) {
                    left[half] = rows + min(r + half * 8 + lane / 4, count - 1) * part.row_bytes;
                  }
#pragma unroll 2
                  for (uint32_t i = lane % 4; i < pieces; i += 4) {
                    const Words b = right[i];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                      const Words a = reinterpret_cast<const Words*>(left[half])[i];
#pragma unroll
                      for (int j = 0; j < 4; j++) {
                        const float2 x = pair_in<W>(a.at[j]), y = pair_in<W>(b.at[j]);
                        sums[half].x = fmaf(x.x, y.x, sums[half].x), sums[half].y = fmaf(x.y, y.y, sums[half].y);
                      }
                    }
                  }
#pragma unroll
                  for (int half = 0; half < 2; half++) {
                    const uint32_t row = r + half * 8 + lane / 4;
                    const float sum = reduce_lanes<4>(sums[half].x + sums[half].y, Add{});
                    if (lane % 4 == 0 && row < count) made[first + row] = static_cast<W>(sum);
                  }
                }
              });
  }

  // step_states of heads.cuh, for one token.
  __device__ __forceinline__ void recur(HeadMemory& memory) {
    const int value = threadIdx.x / 8, eighth = threadIdx.x % 8;
    const float4* in = reinterpret_cast<const float4*>(memory.in) + eighth;
    float4 s[2][2];
    float removed[2] = {}, y[2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        s[i][part] = pieces_.get(i, part);
        removed[i] += dot4(s[i][part], in[kA * 16 + part * 8]);
      }
      removed[i] = reduce_lanes<8>(removed[i], Add{});
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float v = memory.in[kV][value + 32 * i];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int j = part * 8;
        s[i][part] = step4(s[i][part], in[kW * 16 + j], removed[i], in[kB * 16 + j], v, in[kK * 16 + j]);
        y[i] += dot4(s[i][part], in[kR * 16 + j]);
        pieces_.set(i, part, s[i][part]);
      }
      y[i] = reduce_lanes<8>(y[i], Add{});
      if (eighth == 0) memory.y[value + 32 * i] = token_.ok ? y[i] : token_.nothing();
    }
    if (token_.ok) pieces_.store(state_);
  }

  const Single& p_;
  const TokenRow token_;
  HeadMemory& memory_;
  uint32_t layer_, channel_;
  HeadStep<W, S> step_{};
  S* state_;
  StatePieces<S> pieces_{};
  HeadWeights weights_{};
};

}  // namespace cog_rwkv

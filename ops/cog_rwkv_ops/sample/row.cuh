// One row of logits on its way to an id, and a block's part of that work.
#pragma once

#include "cut.h"
#include "sample.h"
#include "team.cuh"

namespace cog_rwkv::sampling {

template <class T>
struct Work {
  const T* logits;       // [batch, vocab]
  const int64_t* rows;   // [batch]
  const bool* allowed;   // [vocab]
  const float* numbers;  // [pool, kNumbers]
  int64_t* integers;     // [pool, kIntegers], rows strides.integers apart
  float* counts;         // [pool, vocab], rows strides.counts apart
  int64_t* ids;          // [batch]
  bool* finite;          // [batch]
  int64_t vocab, pool;
  Strides strides;
  Team team;
};

// What a block keeps in shared memory. What other blocks read is written anew only after a barrier of the team that
// they reach with the reading behind them.
struct Shared {
  uint32_t low[kBins], high[kBins];  // the halves of the sums over this block's ids, a bin each
  uint64_t warps[kWarps];            // for block_scan
  uint64_t best;                     // order and place of the likeliest id: the larger, the likelier
  uint32_t bad;                      // whether a logit is not finite
  uint64_t all;                      // the sum of what is looked at in the first cut
  uint64_t slice;                    // the sum over this block's slice of the bins, of all blocks' ids
  uint64_t kept;                     // the sum of the weights that may be drawn
  int bin;                           // what thread finds it tells its block here
  uint64_t before;
  int64_t id;
};

// A 64-bit addition out of two of 32 bits, for which shared memory has an instruction: who makes the low half turn over
// carries.
__device__ __forceinline__ void add(Shared& s, int bin, uint64_t amount) {
  const auto low = static_cast<uint32_t>(amount), before = atomicAdd(&s.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < before ? 1 : 0);
  if (high) atomicAdd(&s.high[bin], high);
}

// Loads that no store of the kernel can hold up.
__device__ __forceinline__ float read(const float* from) { return __ldg(from); }
template <class T>  // Half, BFloat16
__device__ __forceinline__ float read(const T* from) {
  static_assert(sizeof(T) == sizeof(unsigned short));
  const unsigned short bits = __ldg(reinterpret_cast<const unsigned short*>(from));
  T half;
  memcpy(&half, &bits, sizeof(half));
  return static_cast<float>(half);
}
__device__ __forceinline__ bool read(const bool* from) {
  return __ldg(reinterpret_cast<const unsigned char*>(from)) != 0;
}

// The ids from begin to end of a row, and which thread looks at which: each warp has a segment, so that sums over
// warps are sums over ids that follow each other, and its lanes read neighbours.
template <class T, bool kCached>
struct Part {
  const Work<T>& p;
  const T* logits;
  const float* counts;
  const Parameters& parameters;
  float* cache;  // [end - begin], the values; only where kCached
  int begin, end, segment;
  float top = 0.0f;

  __device__ Part(const Work<T>& work, const T* row, const float* count, const Parameters& given, float* shared)
      : p(work), logits(row), counts(count), parameters(given), cache(shared) {
    const int vocab = static_cast<int>(p.vocab), size = (vocab + p.team.size - 1) / p.team.size;
    begin = min(vocab, p.team.rank() * size);
    end = min(vocab, begin + size);
    segment = ((size + kWarps - 1) / kWarps + 31) / 32 * 32;
  }

  __device__ float value_at(int i, float logit, bool allowed) const {
    if (!allowed) return -INFINITY;
    return parameters.counted ? penalised(logit, __ldcg(counts + i), parameters.presence, parameters.frequency)
                              : plus(logit, 0.0f);
  }

  __device__ uint32_t distance_at(int i) const {
    return distance(kCached ? cache[i - begin] : value_at(i, read(logits + i), read(p.allowed + i)), top);
  }

  // body(i) for the ids of this thread, in order.
  template <int kUnroll = 4, class Body>
  __device__ void each(const Body& body) const {
    const int from = begin + static_cast<int>(threadIdx.x / 32) * segment, last = min(end, from + segment);
#pragma unroll kUnroll
    for (int i = from + static_cast<int>(threadIdx.x % 32); i < last; i += 32) body(i);
  }

  // Reads the logits; the likeliest id of this thread's, as Shared::best, and whether a logit is not finite.
  __device__ uint64_t take(bool& bad) const {
    uint32_t most = 0, place = 0;
    bad = false;
    each<8>([&](int i) {
      const bool allowed = read(p.allowed + i);
      const float logit = read(logits + i), value = value_at(i, logit, allowed);
      const uint32_t order = order_of(value, allowed);
      if (kCached) cache[i - begin] = value;
      bad |= !is_finite(logit);
      if (order > most) {
        most = order;
        place = i;
      }
    });
    return most == 0 ? 0 : static_cast<uint64_t>(most) << 32 | (0xffffffffu - place);
  }
};

}  // namespace cog_rwkv::sampling

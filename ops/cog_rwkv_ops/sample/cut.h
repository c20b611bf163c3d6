// How the distance is found at which a sum over the likeliest ids reaches what is wanted: by sums over bins, in at most
// four rounds, each within the bin that was found in the one before.
#pragma once

#include "weight.h"

namespace cog_rwkv::sampling {

constexpr int kBins = 2048;

// Distances from `low` to `high` (bits, both included), cut into at most kBins bins, in order.
struct Cut {
  uint32_t low, high;
  float scale;  // of the first round: bins of equal width in logits, where few ids share a bin; else 0
  int shift;    // of later rounds: bins of 2^shift floats

  // Distances up to `limit`. What weighs anything lies within 32 temperatures; the last bin takes all that is beyond.
  COG_RWKV_BOTH static Cut first(uint32_t limit, float temperature) {
    int power = 5 + 127 - static_cast<int>((bits_of(temperature) >> 23) & 255);
    power = power > 100 ? 100 : power < -100 ? -100 : power;
    return {0, limit, float_of(static_cast<uint32_t>(power + 127) << 23), 0};
  }

  COG_RWKV_BOTH bool has(uint32_t distance) const { return low <= distance && distance <= high; }

  COG_RWKV_BOTH int bin(uint32_t distance) const {
    if (scale == 0.0f) return static_cast<int>((distance - low) >> shift);
    const float at = times(float_of(distance), scale);
    return static_cast<int>(at < kBins - 1 ? at : kBins - 1.0f);
  }

  // The next round's, within bin `b`; where there is none any more, low and high are the distance that was sought.
  COG_RWKV_BOTH Cut inside(int b) const {
    Cut next{low, high, 0.0f, 0};
    if (scale == 0.0f) {
      next.low = low + (static_cast<uint32_t>(b) << shift);
      const uint32_t last = next.low + ((1u << shift) - 1);
      next.high = last < high ? last : high;
    } else {  // scale is a power of two: these products are exact
      const float width = over(1.0f, scale);
      next.low = bits_of(times(static_cast<float>(b), width));
      const uint32_t last = bits_of(times(static_cast<float>(b + 1), width)) - 1;
      next.high = b < kBins - 1 && last < high ? last : high;
    }
    while ((next.high - next.low) >> next.shift >= kBins) next.shift++;
    return next;
  }
};

}  // namespace cog_rwkv::sampling

// wkv4 on CUDA.
#pragma once

#include <cstring>

#include "walk.cuh"

namespace cog_rwkv {

// As many tokens as fit the registers twice.
template <class T, int kEach>
constexpr int kPiece4 = sizeof(T) * kEach == 8 ? 8 : 16;

// Two halves as one word, which nvcc would store one after the other.
template <class T, int kEach>
__device__ __forceinline__ void store_together(T* to, const Vector<T, kEach>& y) {
  if constexpr (sizeof(y) == sizeof(uint32_t)) {
    uint32_t bits;
    memcpy(&bits, &y, sizeof(bits));
    *reinterpret_cast<uint32_t*>(to) = bits;
  } else {
    store_vector<T, kEach>(to, y);
  }
}

template <class T, int kEach, bool kCut>
__global__ void __launch_bounds__(kCut ? kThreads4 : kLanes) wkv4_kernel(const Wkv4<T> p) {
  using Place = Place4<kEach, kCut>;
  __shared__ Shared4<Place> shared;
  const Place place(p);
  float rate[kEach], u[kEach];
  for (int i = 0; i < kEach; i++) {
    rate[i] = place.inside ? expf(p.w[place.channel + i]) : 0.0f;
    u[i] = place.inside ? p.u[place.channel + i] : 0.0f;
  }
  Sums4 s[kEach];
  place.load(s, p, p.state);
  walk<kPiece4<T, kEach>>(p, place, shared, s, rate, [&](const auto& piece, int64_t first, Sums4(&sums)[kEach]) {
    T* to = p.y + place.at(p, first);
    piece.each([&](int t) {
      Vector<T, kEach> y;
      for (int i = 0; i < kEach; i++) {
        const Sums4 own = piece.sums_of(t, i);
        y.values[i] = static_cast<T>(Read4(sums[i], u[i], own.p, own.a).y);
        sums[i].join(rate[i], own);
      }
      store_together(to, y);
      to += p.channels;
    });
  });
  if (!place.inside || place.segment != place.segments - 1) return;
  float* end = p.end + place.sequence * 3 * p.channels + place.channel;
  for (int i = 0; i < kEach; i++) end[i] = s[i].a, end[p.channels + i] = s[i].b, end[2 * p.channels + i] = s[i].p;
}

}  // namespace cog_rwkv

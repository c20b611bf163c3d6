// How the threads of wkv4 walk through time on CUDA.
//
// A thread takes a piece of some tokens at a time, of one channel or of two side by side, and the next piece is on its
// way while it works. Where there are channels enough to fill the GPU, that is all. Else a window of time is cut into
// segments, a piece each: every thread sums its own piece from nothing, the sums are put together in the order of time
// (`gather`), and it walks its piece again, out of registers, from its true start. A block then has 32 channels.
#pragma once

#include "../csrc/cuda.cuh"
#include "sums.cuh"

namespace cog_rwkv {

constexpr int kLanes = 32, kThreads4 = 512;  // a warp; the threads of a block at most: each may have 128 registers

template <class T>
struct Wkv4 {
  const float *w, *u, *state;  // [C], [C], [B, 3, C]
  const T *k, *v;              // [B, T, C]
  int64_t tokens, channels;
  float* end;
  T* y;
  // The backward has these as well.
  const T* d_y;
  const float* d_end;
  float *kept, *d_w, *d_u, *d_state;  // kept: [3, B, pieces, C], the sums before each piece
  T *d_k, *d_v;
};

// A thread's channels, kEach from `channel` on, and its segment of every window: kCut tells whether there are several.
template <int kEach_, bool kCut_>
struct Place4 {
  static constexpr int kEach = kEach_;
  static constexpr bool kCut = kCut_;
  static constexpr int kWide = kCut ? kLanes / kEach : kLanes;  // threads of a segment in a block
  static constexpr int kMost = kCut ? kThreads4 / kWide : 1;    // segments at most

  int64_t channel, sequence;
  int segment, segments;
  bool inside;

  template <class T>
  __device__ explicit Place4(const Wkv4<T>& p)
      : channel((static_cast<int64_t>(blockIdx.x) * kWide + threadIdx.x) * kEach),
        sequence(blockIdx.y),
        segment(kCut ? threadIdx.y : 0),
        segments(kCut ? blockDim.y : 1),
        inside(channel < p.channels) {}

  // Of token t in k and what is like it.
  template <class T>
  __device__ int64_t at(const Wkv4<T>& p, int64_t t) const {
    return (sequence * p.tokens + t) * p.channels + channel;
  }
  __device__ int column(int i) const { return i * kWide + threadIdx.x; }  // of a channel in shared memory
  __device__ void store(Sums4 (&to)[kLanes], const Sums4 (&s)[kEach]) const {
    for (int i = 0; i < kEach; i++) to[column(i)] = s[i];
  }

  // The sums of [B, 3, C].
  template <class T>
  __device__ void load(Sums4 (&s)[kEach], const Wkv4<T>& p, const float* from) const {
    from += sequence * 3 * p.channels + channel;
    for (int i = 0; i < kEach; i++)
      s[i] = inside ? Sums4{from[i], from[p.channels + i], from[2 * p.channels + i]} : Sums4::nothing();
  }
};

// Tokens that a thread has in registers.
template <class T, int kEach, int kTokens_>
struct Piece4 {
  static constexpr int kTokens = kTokens_;
  Vector<T, kEach> k[kTokens], v[kTokens];
  int count;  // of those that are there

  // Calls f(i) for each token, in the order of time or against it. Whole pieces have no branches.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if (count == kTokens) {
#pragma unroll
      for (int i = 0; i < kTokens; i++) f(i);
    } else {
#pragma unroll
      for (int i = 0; i < kTokens; i++)
        if (i < count) f(i);
    }
  }
  template <class F>
  __device__ __forceinline__ void each_back(F f) const {
    if (count == kTokens) {
#pragma unroll
      for (int i = kTokens - 1; i >= 0; i--) f(i);
    } else {
#pragma unroll
      for (int i = kTokens - 1; i >= 0; i--)
        if (i < count) f(i);
    }
  }
  // The tokens from `first` on; none past the last.
  template <class Place>
  __device__ __forceinline__ void load(const Wkv4<T>& p, const Place& place, int64_t first) {
    count = place.inside ? static_cast<int>(max(min(p.tokens - first, int64_t{kTokens}), int64_t{0})) : 0;
    const T *from_k = p.k + place.at(p, first), *from_v = p.v + place.at(p, first);
    each([&](int i) {
      k[i] = load_vector<T, kEach>(from_k);
      v[i] = load_vector<T, kEach>(from_v);
      from_k += p.channels, from_v += p.channels;
    });
  }
  __device__ __forceinline__ Sums4 sums_of(int i, int channel) const {
    return {static_cast<float>(v[i].values[channel]), 1.0f, static_cast<float>(k[i].values[channel])};
  }
};

// The sums of each segment in two windows, one after the other in turn, and those at the start of a window.
template <class Place>
struct Shared4 {
  Sums4 all[2][Place::kMost][kLanes], start[2][kLanes];
};

// s becomes the sums before the thread's piece, whose own are `mine`; `left` tokens are from the window's start on.
template <int kTokens, class Place>
__device__ __forceinline__ void gather(Sums4 (&s)[Place::kEach], const Sums4 (&mine)[Place::kEach], const Place& place,
                                       const Sums4 (&start)[kLanes], Sums4 (*all)[kLanes],
                                       const float (&rate)[Place::kEach], int64_t left) {
  constexpr int kEach = Place::kEach;
  place.store(all[place.segment], mine);
  __syncthreads();
  for (int i = 0; i < kEach; i++) s[i] = start[place.column(i)];
  for (int before = 0; before < place.segment; before++, left -= kTokens) {
    if (left <= 0) break;
    const float count = static_cast<float>(static_cast<int>(min(left, int64_t{kTokens})));
    for (int i = 0; i < kEach; i++) s[i].join(rate[i] * count, all[before][place.column(i)]);
  }
}

// Goes through time from s, the state. f(piece, first, s) takes the piece whose first token is `first` from s, the sums
// before it, and leaves those after it. In the last segment s are those after the last token at the end.
template <int kTokens, class T, class Place, class F>
__device__ __forceinline__ void walk(const Wkv4<T>& p, const Place& place, Shared4<Place>& shared,
                                     Sums4 (&s)[Place::kEach], const float (&rate)[Place::kEach], F f) {
  constexpr int kEach = Place::kEach;
  const int64_t own = int64_t{kTokens} * place.segment, window = int64_t{kTokens} * place.segments;
  Piece4<T, kEach, kTokens> next;
  next.load(p, place, own);
  if constexpr (Place::kCut) {
    if (place.segment == 0) place.store(shared.start[0], s);
  }
  int turn = 0;
  for (int64_t begin = 0; begin < p.tokens; begin += window, turn ^= 1) {
    const auto piece = next;
    next.load(p, place, begin + window + own);
    if constexpr (Place::kCut) {
      Sums4 mine[kEach];
      for (int i = 0; i < kEach; i++) mine[i] = Sums4::nothing();
      piece.each([&](int t) {
        for (int i = 0; i < kEach; i++) mine[i].join(rate[i], piece.sums_of(t, i));
      });
      gather<kTokens>(s, mine, place, shared.start[turn], shared.all[turn], rate, p.tokens - begin);
    }
    f(piece, begin + own, s);
    if constexpr (Place::kCut) {
      // Read after the next gather's barrier, and written again after the one behind that.
      if (place.segment == place.segments - 1) place.store(shared.start[turn ^ 1], s);
    }
  }
}

}  // namespace cog_rwkv

// wkv4_backward on CUDA: once through time, which keeps the sums before each piece, and once back. On the way back each
// piece makes the sums before its tokens anew, and the gradients of the sums go from piece to piece as the sums went on
// the way there: d are those of the sums that the state stands for, times e^-(d.p), and `of_p` that of the exponent p
// as such, which belongs to the token that set it.
#pragma once

#include "walk.cuh"

namespace cog_rwkv {

constexpr int kPieceBack4 = 8;  // tokens, whose sums are registers as well

// What a segment, or all that is behind a place, has to say to the tokens before it.
struct Behind4 {
  Sums4 d;
  float of_p;  // of a segment: 0 where one of its tokens sets the exponent, else 1
};

template <class T>
struct PieceBack4 : Piece4<T, 1, kPieceBack4> {
  using Piece = Piece4<T, 1, kPieceBack4>;
  Vector<T, 1> d_y[kPieceBack4];
  Sums4 start;  // the sums before it

  template <class Place>
  __device__ __forceinline__ void load(const Wkv4<T>& p, const Place& place, int64_t first) {
    Piece::load(p, place, first);
    const T* from = p.d_y + place.at(p, first);
    this->each([&](int t) {
      d_y[t] = load_vector<T, 1>(from);
      from += p.channels;
    });
    start = Sums4::nothing();
    if (this->count == 0) return;
    const float* kept = p.kept + kept_at(p, place, first);
    const int64_t plane = kept_size(p);
    start = {kept[0], kept[plane], kept[2 * plane]};
  }
  __device__ static int64_t pieces(const Wkv4<T>& p) { return (p.tokens + kPieceBack4 - 1) / kPieceBack4; }
  __device__ static int64_t kept_size(const Wkv4<T>& p) { return gridDim.y * pieces(p) * p.channels; }
  template <class Place>
  __device__ static int64_t kept_at(const Wkv4<T>& p, const Place& place, int64_t first) {
    return (place.sequence * pieces(p) + first / kPieceBack4) * p.channels + place.channel;
  }
};

// A token on the way back; s are the sums before it.
struct StepBack4 {
  float k, v, older;
  bool sets;  // the exponent
  Read4 read;
  float gradient;  // of y, over the denominator

  __device__ __forceinline__ StepBack4(const Sums4& token, const Sums4& s, float d_y, float rate, float u)
      : k(token.p), v(token.a), older(s.p - rate), sets(k >= older), read(s, u, k, v), gradient(d_y * read.scale) {}
  __device__ __forceinline__ void back(Sums4& d, float rate) const {
    d.join(rate, {gradient, -gradient * read.y, -read.q});
  }
};

struct SharedBack4 {
  Behind4 all[2][kThreads4 / kLanes][kLanes], start[2][kLanes];
};

// What is behind the thread's piece, of the `left` tokens from the window's start on and of all after them.
template <class Place>
__device__ __forceinline__ Behind4 gather_back(const Behind4& mine, const Place& place, const Behind4 (&start)[kLanes],
                                               Behind4 (*all)[kLanes], float rate, int64_t left) {
  const int column = place.column(0);
  all[place.segment][column] = mine;
  __syncthreads();
  Behind4 behind = start[column];
  for (int later = place.segments - 1; later > place.segment; later--) {
    const int64_t count = min(left - later * kPieceBack4, int64_t{kPieceBack4});
    if (count <= 0) continue;
    const Behind4 other = all[later][column];
    behind.d.join(rate * static_cast<float>(static_cast<int>(count)), other.d);
    behind.of_p *= other.of_p;
  }
  return behind;
}

// The gradients of the state after the last token, where s is that state.
template <class T, class Place>
__device__ __forceinline__ Behind4 behind_all(const Wkv4<T>& p, const Place& place, const Sums4& s) {
  Sums4 d[1];
  place.load(d, p, p.d_end);
  return {{d[0].a, d[0].b, -s.p}, d[0].p - d[0].a * s.a - d[0].b * s.b};
}

// The sum over the segments of a channel, in one fixed order; in segment 0.
template <class Place>
__device__ __forceinline__ float sum_segments(const Place& place, Behind4 (*all)[kLanes], float x) {
  if constexpr (!Place::kCut) return x;
  __syncthreads();
  all[place.segment][place.column(0)].of_p = x;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < place.segments && place.segment == 0; i++) sum += all[i][place.column(0)].of_p;
  return sum;
}

template <class T, bool kCut>
__global__ void __launch_bounds__(kCut ? kThreads4 : kLanes) wkv4_backward_kernel(const Wkv4<T> p) {
  using Place = Place4<1, kCut>;
  using Piece = PieceBack4<T>;
  constexpr int kTokens = kPieceBack4;
  __shared__ Shared4<Place> shared;
  __shared__ SharedBack4 shared_back;
  const Place place(p);
  const float rate = place.inside ? expf(p.w[place.channel]) : 0.0f, u = place.inside ? p.u[place.channel] : 0.0f;
  Sums4 s[1];
  place.load(s, p, p.state);
  walk<kTokens>(p, place, shared, s, {rate}, [&](const auto& piece, int64_t first, Sums4(&sums)[1]) {
    if (piece.count > 0) {
      float* kept = p.kept + Piece::kept_at(p, place, first);
      const int64_t plane = Piece::kept_size(p);
      kept[0] = sums[0].a, kept[plane] = sums[0].b, kept[2 * plane] = sums[0].p;
    }
    piece.each([&](int t) { sums[0].join(rate, piece.sums_of(t, 0)); });
  });
  Behind4 behind = behind_all(p, place, s[0]);  // of the last segment, which alone has the state after the last token
  if constexpr (kCut) {
    if (place.segment == place.segments - 1) shared_back.start[0][place.column(0)] = behind;
  }

  const int64_t own = int64_t{kTokens} * place.segment, window = int64_t{kTokens} * place.segments;
  const int64_t last = p.tokens > 0 ? (p.tokens - 1) / window * window : -1;
  float d_rate = 0.0f, d_u = 0.0f;
  int turn = 0;
  Piece next;
  if (last >= 0) next.load(p, place, last + own);
  for (int64_t begin = last; begin >= 0; begin -= window, turn ^= 1) {
    const Piece piece = next;
    if (begin > 0) next.load(p, place, begin - window + own);
    Sums4 before[kTokens], sums = piece.start;
    piece.each([&](int t) {
      before[t] = sums;
      sums.join(rate, piece.sums_of(t, 0));
    });
    const auto step_of = [&](int t) {
      return StepBack4(piece.sums_of(t, 0), before[t], static_cast<float>(piece.d_y[t].values[0]), rate, u);
    };
    if constexpr (kCut) {
      Behind4 mine{Sums4::nothing(), 1.0f};
      piece.each_back([&](int t) {
        const StepBack4 step = step_of(t);
        if (step.sets) mine.of_p = 0.0f;
        step.back(mine.d, rate);
      });
      behind = gather_back(mine, place, shared_back.start[turn], shared_back.all[turn], rate, p.tokens - begin);
    }
    const int64_t at = place.at(p, begin + own + piece.count - 1);
    T *to_k = p.d_k + at, *to_v = p.d_v + at;
    piece.each_back([&](int t) {
      const StepBack4 step = step_of(t);
      const Sums4& d = behind.d;
      const float own_share = step.read.own * step.gradient, with_own = own_share * (step.v - step.read.y);
      const float later = expf(step.k + d.p), share = step.sets ? behind.of_p : 0.0f;
      d_u += with_own;
      behind.of_p -= share;
      d_rate -= expf(step.older + d.p) * (d.a * before[t].a + d.b * before[t].b) + behind.of_p;
      *to_k = static_cast<T>(later * (step.v * d.a + d.b) + with_own + share);
      *to_v = static_cast<T>(later * d.a + own_share);
      to_k -= p.channels, to_v -= p.channels;
      step.back(behind.d, rate);
    });
    if constexpr (kCut) {
      if (place.segment == 0) shared_back.start[turn ^ 1][place.column(0)] = behind;
    }
  }
  d_rate = sum_segments(place, shared_back.all[turn], d_rate);
  d_u = sum_segments(place, shared_back.all[turn], d_u);
  if (place.segment != 0 || !place.inside) return;
  Sums4 start[1];
  place.load(start, p, p.state);
  const float back = expf(behind.d.p + start[0].p), d_a = behind.d.a * back, d_b = behind.d.b * back;
  float* to = p.d_state + place.sequence * 3 * p.channels + place.channel;
  to[0] = d_a, to[p.channels] = d_b, to[2 * p.channels] = d_a * start[0].a + d_b * start[0].b + behind.of_p;
  p.d_w[place.sequence * p.channels + place.channel] = d_rate * rate;
  p.d_u[place.sequence * p.channels + place.channel] = d_u;
}

}  // namespace cog_rwkv

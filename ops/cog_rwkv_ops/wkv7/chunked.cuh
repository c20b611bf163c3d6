// wkv7 in chunks of 16 tokens on tensor cores, for sequences that are long enough (wkv7.cu chooses; for 16-bit inputs
// on Hopper it takes warpgroup.cuh).
//
// With g the log-decay summed over the chunk up to a token, and m that sum at the chunk's middle (per key),
//   r~ = r e^(g - m), k~ = k e^(m - g), b~ = b e^(m - g), and a~ = a e^(g' - m), g' the sum before the token,
// the chunk is a few products of matrices (tril: the lower triangle; -1: without the diagonal):
//   T = (I - tril(a~ b~', -1))^-1    W = T a~    A = T tril(a~ k~', -1)    P = tril(r~ k~')    Q = tril(r~ b~')
//   S <- S diag(e^m)    U = W S' + A V    Y = r~ S' + P V + Q U    S <- (S + V' k~ + U' b~) diag(e^(G - m))
// Measured from the middle, no factor leaves [2^-7, 2^7], as a decay is at least 0.5452. T comes by substitution, in
// float32: repeated squaring fails where keys are alike. Everything else is a product in tf32, split (csrc/mma.cuh)
// where the inputs are float32.
//
// Only the last line needs the state, so a block has two kinds of warps, both in pairs. Producers take chunks in turn
// and leave in shared memory what does not depend on the state; consumers hold it, 16 values a pair and half of the
// keys each of the two, and follow one chunk behind the other. Values do not meet: where there are few heads, several
// blocks share one, each with some of its values. A sum over keys, in U and in r~ S', is of two parts: the warps of a
// pair exchange them, in the middle of a chunk, and go on with all of U, but y of half of the tokens.
#pragma once

#include "produce.cuh"

namespace cog_rwkv {

constexpr int kMaxProducers = 7;  // as many slots as fit: each pair of producers fills its own
constexpr int kMaxPairs = 8;      // of warps, in a block: what leaves each thread 128 registers
constexpr int kMaxThreads = kMaxPairs * 2 * kWarp;

struct Barriers {
  uint64_t full[kMaxProducers], empty[kMaxProducers];
};

// A head of a sequence, and the block's share of it: values first to first + count.
struct Share {
  Sequence sequence;
  int64_t head;
  int first, count;
};

// Whether there is anything to compute, by all threads of a block; writes NaN where nobody would write.
template <class T>
__device__ bool begin_share(const Wkv7<T, void>& p, int64_t i, const Share& share) {
  if (p.alone && share.first == 0) {
    fill_gaps(p, i, share.head, share.sequence.begin == share.sequence.end);
    if (!share.sequence.row_ok) fill_nan(p, share.head, share.sequence.begin, share.sequence.end);
  }
  return share.sequence.row_ok && p.takes(share.sequence);
}

// What the warps of a pair of consumers tell each other: the parts of U for the sender's own tokens and for those of
// the other, and of y for the latter. Twice, for chunks in turn: so one barrier a chunk is enough.
struct Exchange {
  float4 sums[2][2][3][kWarp];  // [turn][sender][which][lane]
};

// So many slots in shared memory.
struct Ring {
  float* base;
  int count;
  __device__ Slot at(int i) const { return {base + i * Slot::kFloats}; }
};

template <class T, bool split>
__device__ __forceinline__ void produce(const Wkv7<T, void>& p, const Share& s, Ring slots, Barriers& barriers,
                                        int producer, Team team) {
  const Slot slot = slots.at(producer);
  uint32_t parity = 1;
  const int64_t step = int64_t{kChunk} * slots.count;
  for (int64_t t = s.sequence.begin + producer * kChunk; t < s.sequence.end; t += step, parity ^= 1) {
    const int n = static_cast<int>(min(s.sequence.end - t, int64_t{kChunk}));
    wait(&barriers.empty[producer], parity);
    start_copies<kR>(p.in, p.heads, slot, t, n, s.head, s.first, s.count, team);
    wait_for_copies();
    team.sync();
    make_chunk<T, split>(slot, n, team);
    arrive(&barriers.full[producer]);
  }
}

// A warp of a pair of consumers: `kPart` 0 or 1 of the keys, and the half of the tokens whose y it has. Tokens in
// halves are in the order of the warp: its own, then the other's.
template <int kPart>
struct Consumer {
  int lane, barrier;
  static __device__ __forceinline__ constexpr int half(int i) { return i ^ kPart; }
};

// 16 values of the state and the keys of a part, as a result of 16 x 64 (slot.cuh).
using State = Sums[4];

template <int kPart>
__device__ __forceinline__ void scale_state(State& s, const float* factors, Consumer<kPart> c) {
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const float4 f = float4_at(factors + 16 * (c.lane % 4) + first_key(kPart, odd));
    const float four[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int j = 0; j < 4; j++) s[j][odd] *= four[j], s[j][odd + 2] *= four[j];
  }
}

// v of 16 values, as a left operand: [step] has tokens 8 step to 8 step + 7, two of them in this lane.
template <class T>
__device__ __forceinline__ void load_values(Left (&v)[2], const Slot& slot, int value, int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const int token = 8 * step + 2 * q;
    const T *first = slot.values<T>(token) + value + g, *second = slot.values<T>(token + 1) + value + g;
    v[step][0] = static_cast<float>(first[0]), v[step][1] = static_cast<float>(first[8]);
    v[step][2] = static_cast<float>(second[0]), v[step][3] = static_cast<float>(second[8]);
  }
}

// Sums of a chunk in rows of values, for eight tokens in columns. Twice, as chains are slow.
struct Tokens {
  Sums sums = {}, fine = {};

  __device__ __forceinline__ void join() {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += fine[i];
  }
};

// t += x m' for the warp's own tokens, x[i] of tokens first(i) to first(i) + 7, m of tokens by tokens.
template <bool split, int kPart, class First>
__device__ __forceinline__ void add_tokens(Tokens& t, const Left (&x)[2], const float* small, Consumer<kPart> c,
                                           First first) {
  const int g = c.lane / 4, q = c.lane % 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float2 m = float2_at(small + (g + 8 * c.half(0)) * kSmallRow + first(i) + 2 * q);
    multiply<split, 1>([&](int) -> TileProduct { return {t.sums, t.fine, x[i], {m.x, m.y}}; });
  }
}

// u += S W' and y += S r~', as far as the warp's keys go.
template <bool split, int kPart>
__device__ __forceinline__ void read_state(Tokens (&u)[2], Tokens (&y)[2], const State& s, const Slot& slot,
                                           Consumer<kPart> c) {
  const int g = c.lane / 4, q = c.lane % 4;
  float w[2][2][4], r[2][2][4];  // [half][column 2 q or 2 q + 1][tile]
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int token = g + 8 * c.half(half), at = place(16 * q) + first_key(kPart, odd);
      const float4 w4 = float4_at(slot.row(kA, token) + at), r4 = float4_at(slot.row(kR, token) + at);
      w[half][odd][0] = w4.x, w[half][odd][1] = w4.y, w[half][odd][2] = w4.z, w[half][odd][3] = w4.w;
      r[half][odd][0] = r4.x, r[half][odd][1] = r4.y, r[half][odd][2] = r4.z, r[half][odd][3] = r4.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Left state = {operand<split>(s[i][0]), operand<split>(s[i][2]), operand<split>(s[i][1]),
                        operand<split>(s[i][3])};
    multiply<split, 4>([&](int j) -> TileProduct {
      const int half = j % 2;
      Tokens& t = j < 2 ? u[half] : y[half];
      const auto& m = j < 2 ? w : r;
      Sums& sums = split || i % 2 == 0 ? t.sums : t.fine;
      return {sums, t.fine, state, {m[half][0][i], m[half][1][i]}};
    });
  }
}

// s += x m, for x [16 values, 16 tokens], x[i] of tokens first(i) to first(i) + 7, and the keys m of the tokens.
// `exact`: all of x is in its big part.
template <bool split, bool exact = false, int kPart, class First>
__device__ __forceinline__ void add_to_state(State& s, const Left (&x)[2], const Slot& slot, Input input,
                                             Consumer<kPart> c, First first) {
  const int g = c.lane / 4, q = c.lane % 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float one[4], next[4];
    load_columns(one, slot.row(input, first(i) + 2 * q), kPart, g);
    load_columns(next, slot.row(input, first(i) + 2 * q + 1), kPart, g);
    multiply<split, 4, exact>([&](int j) -> TileProduct { return {s[j], s[j], x[i], {one[j], next[j]}}; });
  }
}

__device__ __forceinline__ float4 as_float4(const Sums& x) { return make_float4(x[0], x[1], x[2], x[3]); }

__device__ __forceinline__ void add(Sums& x, float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; }

// One chunk: the state goes on, y[0] gets the warp's own tokens. `sums` is where the pair exchanges its parts.
template <class T, bool split, int kPart>
__device__ __forceinline__ void step_state(State& s, Tokens (&y)[2], const Slot& slot, int value,
                                           float4 (&sums)[2][3][kWarp], Consumer<kPart> c) {
  const auto in_order = [](int i) { return 8 * i; };
  const auto own_first = [&](int i) { return 8 * c.half(i); };
  Tokens u[2], from_v;
  Left v[2], removed[2];
  scale_state(s, slot.before(), c);
  load_values<T>(v, slot, value, c.lane);
  add_tokens<split>(from_v, v, slot.removed(), c, in_order);
  read_state<split>(u, y, s, slot, c);
  u[0].join(), u[1].join(), y[1].join();
  if (split) from_v.join();
  add(u[0].sums, as_float4(from_v.sums));
  float4* const told = &sums[kPart][0][c.lane];
  told[0] = as_float4(u[0].sums), told[kWarp] = as_float4(u[1].sums), told[2 * kWarp] = as_float4(y[1].sums);
  add_to_state<split>(s, v, slot, kK, c, in_order);
  add_tokens<split>(y[0], v, slot.seen(), c, in_order);
  sync_pair(c.barrier);
  const float4* const heard = &sums[1 - kPart][0][c.lane];
  add(u[0].sums, heard[kWarp]), add(u[1].sums, heard[0]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    removed[i][0] = operand<split>(u[i].sums[0]), removed[i][1] = operand<split>(u[i].sums[2]);
    removed[i][2] = operand<split>(u[i].sums[1]), removed[i][3] = operand<split>(u[i].sums[3]);
  }
  add_to_state<split>(s, removed, slot, kB, c, own_first);
  add_tokens<split>(y[0], removed, slot.seen_removed(), c, own_first);
  y[0].join();
  add(y[0].sums, heard[2 * kWarp]);
  scale_state(s, slot.after(), c);
}

// Writes y of the warp's own tokens and the pair's 16 values, `to` where the first of the chunk's n belongs. The lanes
// of two neighbouring values share them out: each writes both of one token.
template <class T, int kPart>
__device__ __forceinline__ void write_y(T* to, int64_t stride, const Sums& y, int n, Consumer<kPart> c) {
  const int g = c.lane / 4, q = c.lane % 4, odd = g % 2, token = 8 * c.half(0) + 2 * q + odd;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float mine = odd ? y[2 * i + 1] : y[2 * i];
    const float got = __shfl_xor_sync(0xffffffffu, odd ? y[2 * i] : y[2 * i + 1], 4);
    const Vector<T, 2> two{{static_cast<T>(odd ? got : mine), static_cast<T>(odd ? mine : got)}};
    if (token < n) store_vector<T, 2>(to + token * stride + 8 * i + g - odd, two);
  }
}

// f(element of s, its place from the first of the pair's values), for all that this lane has.
template <int kPart, class F>
__device__ __forceinline__ void each_element(State& s, Consumer<kPart> c, F f) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int place = (c.lane / 4 + i / 2 * 8) * static_cast<int>(kHead) + c.lane % 4 * 16 + first_key(kPart, i % 2);
#pragma unroll
    for (int j = 0; j < 4; j++) f(s[j][i], place + j);
  }
}

// f(Type<S>{}), S the dtype of the states.
template <class F>
__device__ __forceinline__ void with_state_type(ScalarType type, F f) {
  if (type == ScalarType::Float) return f(Type<float>{});
  if (type == ScalarType::Half) return f(Type<Half>{});
  f(Type<BFloat16>{});
}

template <class T, bool split, int kPart>
__device__ __forceinline__ void consume(const Wkv7<T, void>& p, ScalarType state_type, const Share& share, Ring slots,
                                        Barriers& barriers, Exchange& exchange, int value, Consumer<kPart> c) {
  const int64_t corner = (share.head * kHead + value) * kHead;
  State s;
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    const S* from = static_cast<const S*>(p.state) + share.sequence.row * p.in_stride + corner;
    each_element(s, c, [&](float& x, int at) { x = static_cast<float>(from[at]); });
  });
  int turn = 0, buffer = 0;
  uint32_t parity = 0;
  const int64_t stride = p.heads * kHead;
  for (int64_t t = share.sequence.begin; t < share.sequence.end; t += kChunk, buffer ^= 1) {
    const int n = static_cast<int>(min(share.sequence.end - t, int64_t{kChunk}));
    const Slot slot = slots.at(turn);
    Tokens y[2];
    wait(&barriers.full[turn], parity);
    step_state<T, split>(s, y, slot, value, exchange.sums[buffer], c);
    arrive(&barriers.empty[turn]);
    write_y(p.y + t * stride + share.head * kHead + value, stride, y[0].sums, n, c);
    if (++turn == slots.count) turn = 0, parity ^= 1;
  }
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    S* to = static_cast<S*>(p.state_out) + share.sequence.row * p.out_stride + corner;
    each_element(s, c, [&](float& x, int at) { to[at] = static_cast<S>(x); });
  });
}

// A block a sequence, head and share of its values: 4 / shares pairs of consumers and then `producers` of producers.
// Behind the slots lies what is exchanged.
template <class T, bool split>
__global__ void __launch_bounds__(kMaxThreads, 1)
    wkv7_chunked_kernel(const Wkv7<T, void> p, ScalarType state_type, int shares, int producers) {
  extern __shared__ __align__(16) float memory[];
  __shared__ Barriers barriers;
  wait_for_previous();
  let_next_begin();
  const Ring slots{memory, producers};
  const int64_t i = blockIdx.x / shares / p.heads, head = blockIdx.x / shares % p.heads;
  const int consumers = 4 / shares, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int pair = warp / 2, part = warp % 2, values = static_cast<int>(kHead) / shares;
  const Share share{sequence_of_block(p, i), head, static_cast<int>(blockIdx.x % shares) * values, values};
  if (!begin_share(p, i, share)) return;
  if (threadIdx.x == 0) {
    for (int j = 0; j < producers; j++) {
      init_barrier(&barriers.full[j], 2 * kWarp);
      init_barrier(&barriers.empty[j], 2 * kWarp * consumers);
    }
  }
  __syncthreads();  // barrier 0: the pairs have the next ones
  if (pair >= consumers) {
    produce<T, split>(p, share, slots, barriers, pair - consumers, Team{1 + pair, part, lane});
    return;
  }
  Exchange& exchange = reinterpret_cast<Exchange*>(slots.at(producers).base)[pair];
  const auto consume_part = [&](auto c) {
    consume<T, split>(p, state_type, share, slots, barriers, exchange, share.first + pair * 16, c);
  };
  if (part == 0) {
    consume_part(Consumer<0>{lane, 1 + pair});
  } else {
    consume_part(Consumer<1>{lane, 1 + pair});
  }
}

}  // namespace cog_rwkv

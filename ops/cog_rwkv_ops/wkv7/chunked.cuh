// wkv7 in chunks of 16 tokens on tensor cores, for sequences that are long enough (wkv7.cu chooses).
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
// Only the last line needs the state, so a block has two kinds of warps. Producers take chunks in turn and leave in
// shared memory what does not depend on the state; consumers hold it, 16 values each, and follow one chunk behind the
// other. Values do not meet: where there are few heads, several blocks share one, each with some of its values.
#pragma once

#include "produce.cuh"

namespace cog_rwkv {

constexpr int kMaxProducers = 7;  // as many slots as fit: each producer fills its own
constexpr int kMaxThreads = (4 + kMaxProducers) * kWarp;

struct Barriers {
  uint64_t full[kMaxProducers], empty[kMaxProducers];
};

// A head of a sequence, and the block's share of it: values first to first + count.
struct Share {
  Sequence sequence;
  int64_t head;
  int first, count;
};

template <class T, bool split>
__device__ __forceinline__ void produce(const Wkv7<T, void>& p, const Share& s, float* slots, Barriers& barriers,
                                        int producers, int producer, int lane) {
  const Slot slot{slots + producer * Slot::kFloats};
  uint32_t parity = 1;
  const int64_t step = static_cast<int64_t>(producers) * kChunk;
  for (int64_t t = s.sequence.begin + producer * kChunk; t < s.sequence.end; t += step, parity ^= 1) {
    const int n = static_cast<int>(min(s.sequence.end - t, int64_t{kChunk}));
    wait(&barriers.empty[producer], parity);
    start_copies(p, slot, t, n, s.head, s.first, s.count, lane);
    wait_for_copies();
    __syncwarp();
    scale_inputs<T, split>(slot, n, lane);
    float* lower = slot.inverse();
    between_tokens<split>(slot, lower, lane);
    invert<split>(slot, lower, lane);
    apply_inverse<split>(slot, lane);
    if (lane == 0) arrive(&barriers.full[producer]);
  }
}

// 16 values of the state, as a result of 16 x 64 (slot.cuh).
using State = Sums[8];

__device__ __forceinline__ void scale_state(State& s, float* factors, int q) {
#pragma unroll
  for (int key = 0; key < 16; key += 4) {
    const float4 f = float4_at(factors + 16 * q + key);
    const float four[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[tile_of(key + i)][column_of(key + i)] *= four[i];
      s[tile_of(key + i)][column_of(key + i) + 2] *= four[i];
    }
  }
}

// v of 16 values, as a left operand: [step] has tokens 8 step to 8 step + 7, two of them in this lane.
template <class T>
__device__ __forceinline__ void load_values(Left (&v)[2], const Slot& slot, int value, int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const int token = 8 * step + 2 * q;
    const T* first = reinterpret_cast<const T*>(slot.row(kV, token)) + value + g;
    const T* second = reinterpret_cast<const T*>(slot.row(kV, token + 1)) + value + g;
    v[step][0] = static_cast<float>(first[0]), v[step][1] = static_cast<float>(first[8]);
    v[step][2] = static_cast<float>(second[0]), v[step][3] = static_cast<float>(second[8]);
  }
}

// What a chunk gives in rows of values: [half] has tokens 8 half to 8 half + 7. Sums twice, as chains are slow.
struct Tokens {
  Sums sums[2] = {}, fine[2] = {};

  __device__ __forceinline__ void join() {
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i / 4][i % 4] += fine[i / 4][i % 4];
  }
};

// t += x m', for tokens by tokens m.
template <bool split>
__device__ __forceinline__ void add_tokens(Tokens& t, const Left (&x)[2], const float* small, int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const float2 m[2] = {load_tokens(small, g, step, q), load_tokens(small, g + 8, step, q)};
    multiply<split, 2>(
        [&](int half) -> TileProduct { return {t.sums[half], t.fine[half], x[step], {m[half].x, m[half].y}}; });
  }
}

// u += S W' and y += S r~'.
template <bool split>
__device__ __forceinline__ void read_state(Tokens& u, Tokens& y, const State& s, const Slot& slot, int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int part = 0; part < 2; part++) {  // 8 keys of this lane: tiles 4 part to 4 part + 3
    float w[2][2][4], r[2][2][4];         // [half][column 2 q or 2 q + 1][tile]
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int at = place(16 * q) + key_of(4 * part, odd);
        const float4 w4 = float4_at(slot.row(kA, g + 8 * half) + at), r4 = float4_at(slot.row(kR, g + 8 * half) + at);
        w[half][odd][0] = w4.x, w[half][odd][1] = w4.y, w[half][odd][2] = w4.z, w[half][odd][3] = w4.w;
        r[half][odd][0] = r4.x, r[half][odd][1] = r4.y, r[half][odd][2] = r4.z, r[half][odd][3] = r4.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Sums& x = s[4 * part + i];
      const Left state = {operand<split>(x[0]), operand<split>(x[2]), operand<split>(x[1]), operand<split>(x[3])};
      multiply<split, 4>([&](int j) -> TileProduct {
        const int half = j % 2;
        Tokens& t = j < 2 ? u : y;
        const auto& m = j < 2 ? w : r;
        Sums& sums = split || i % 2 == 0 ? t.sums[half] : t.fine[half];
        return {sums, t.fine[half], state, {m[half][0][i], m[half][1][i]}};
      });
    }
  }
}

// s += x m, for x [16 values, 16 tokens] and the keys m of the tokens.
template <bool split>
__device__ __forceinline__ void add_to_state(State& s, const Left (&x)[2], const Slot& slot, int input, int lane) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int step = 0; step < 2; step++) {
    float first[8], second[8];
    load_columns(first, slot.row(input, 8 * step + 2 * q), g);
    load_columns(second, slot.row(input, 8 * step + 2 * q + 1), g);
    multiply<split, 8>([&](int j) -> TileProduct { return {s[j], s[j], x[step], {first[j], second[j]}}; });
  }
}

// One chunk: the state goes on, y gets the tokens.
template <class T, bool split>
__device__ __forceinline__ void step_state(State& s, Tokens& y, const Slot& slot, int value, int lane) {
  Tokens u;
  Left v[2], removed[2];
  scale_state(s, slot.before(), lane % 4);
  load_values<T>(v, slot, value, lane);
  add_tokens<split>(u, v, slot.removed(), lane);
  add_tokens<split>(y, v, slot.seen(), lane);
  read_state<split>(u, y, s, slot, lane);
  add_to_state<split>(s, v, slot, kK, lane);
  u.join();
#pragma unroll
  for (int step = 0; step < 2; step++) {
    removed[step][0] = operand<split>(u.sums[step][0]), removed[step][1] = operand<split>(u.sums[step][2]);
    removed[step][2] = operand<split>(u.sums[step][1]), removed[step][3] = operand<split>(u.sums[step][3]);
  }
  add_to_state<split>(s, removed, slot, kB, lane);
  add_tokens<split>(y, removed, slot.seen_removed(), lane);
  y.join();
  scale_state(s, slot.after(), lane % 4);
}

// Writes y of n tokens and this warp's 16 values, `to` where the first belongs, by way of the place of their v.
template <class T>
__device__ __forceinline__ void write_y(T* to, int64_t stride, const Slot& slot, int value, const Tokens& y, int n,
                                        int lane) {
  const int g = lane / 4, q = lane % 4;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int token = i / 4 * 8 + 2 * q + i % 2;
    reinterpret_cast<T*>(slot.row(kV, token))[value + g + i / 2 % 2 * 8] = static_cast<T>(y.sums[i / 4][i % 4]);
  }
  __syncwarp();
  const int token = lane / 2, part = lane % 2 * 8;
  if (token >= n) return;
  constexpr int kPer16 = 16 / sizeof(T);
  const T* from = reinterpret_cast<const T*>(slot.row(kV, token)) + value + part;
#pragma unroll
  for (int i = 0; i < 8; i += kPer16)
    store_vector<T, kPer16>(to + token * stride + part + i, load_vector<T, kPer16>(from + i));
}

// f(element of s, its place from the first of the warp's values), for all that this lane has.
template <class F>
__device__ __forceinline__ void each_element(State& s, int lane, F f) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
#pragma unroll
    for (int key = 0; key < 16; key++)
      f(s[tile_of(key)][2 * row + column_of(key)],
        (lane / 4 + 8 * row) * static_cast<int>(kHead) + lane % 4 * 16 + key);
  }
}

// f(Type<S>{}), S the dtype of the states.
template <class F>
__device__ __forceinline__ void with_state_type(ScalarType type, F f) {
  if (type == ScalarType::Float) return f(Type<float>{});
  if (type == ScalarType::Half) return f(Type<Half>{});
  f(Type<BFloat16>{});
}

template <class T, bool split>
__device__ __forceinline__ void consume(const Wkv7<T, void>& p, ScalarType state_type, const Share& share, float* slots,
                                        Barriers& barriers, int producers, int consumer, int lane) {
  const int value = share.first + consumer * 16;
  const int64_t corner = (share.head * kHead + value) * kHead;
  State s;
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    const S* from = static_cast<const S*>(p.state) + share.sequence.row * p.in_stride + corner;
    each_element(s, lane, [&](float& x, int at) { x = static_cast<float>(from[at]); });
  });
  int turn = 0;
  uint32_t parity = 0;
  const int64_t stride = p.heads * kHead;
  for (int64_t t = share.sequence.begin; t < share.sequence.end; t += kChunk) {
    const int n = static_cast<int>(min(share.sequence.end - t, int64_t{kChunk}));
    const Slot slot{slots + turn * Slot::kFloats};
    Tokens y;
    if (p.checkpoints != nullptr) {
      const int64_t chunk = (t - share.sequence.begin) / kChunk, chunks = (p.each + kChunk - 1) / kChunk;
      float* to = p.checkpoints + (share.sequence.row * p.heads * chunks + share.head * chunks + chunk) * kHead * kHead;
      each_element(s, lane, [&](float& x, int at) { to[value * kHead + at] = x; });
    }
    wait(&barriers.full[turn], parity);
    step_state<T, split>(s, y, slot, value, lane);
    write_y(p.y + t * stride + share.head * kHead + value, stride, slot, value, y, n, lane);
    __syncwarp();
    if (lane == 0) arrive(&barriers.empty[turn]);
    if (++turn == producers) turn = 0, parity ^= 1;
  }
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    S* to = static_cast<S*>(p.state_out) + share.sequence.row * p.out_stride + corner;
    each_element(s, lane, [&](float& x, int at) { to[at] = static_cast<S>(x); });
  });
}

// A block a sequence, head and share of its values: 4 / shares consumers and then `producers` producers.
template <class T, bool split>
__global__ void __launch_bounds__(kMaxThreads, 1)
    wkv7_chunked_kernel(const Wkv7<T, void> p, ScalarType state_type, int shares, int producers) {
  extern __shared__ __align__(16) float slots[];
  __shared__ Barriers barriers;
  wait_for_previous();
  let_next_begin();
  const int64_t count = p.heads * shares, i = blockIdx.x / count;
  const int part = static_cast<int>(blockIdx.x % count);
  const int consumers = 4 / shares, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int values = static_cast<int>(kHead) / shares;
  const Share share{sequence_of_block(p, i), part / shares, part % shares * values, values};
  if (p.alone && share.first == 0) {
    fill_gaps(p, i, share.head, share.sequence.begin == share.sequence.end);
    if (!share.sequence.row_ok) fill_nan(p, share.head, share.sequence.begin, share.sequence.end);
  }
  if (!share.sequence.row_ok || !p.takes(share.sequence)) return;
  if (threadIdx.x == 0) {
    for (int j = 0; j < producers; j++) {
      init_barrier(&barriers.full[j], 1);
      init_barrier(&barriers.empty[j], consumers);
    }
  }
  __syncthreads();
  if (warp < consumers) {
    consume<T, split>(p, state_type, share, slots, barriers, producers, warp, lane);
  } else {
    produce<T, split>(p, share, slots, barriers, producers, warp - consumers, lane);
  }
}

}  // namespace cog_rwkv

// The gradient of wkv7 on CUDA, its first part: what goes from chunk to chunk, in two scans beside each other.
//
// With the names of chunked.cuh, S_e the state after a chunk's first factor and d for the gradient of what follows:
//   forwards    S_e = S diag(e^m)          U = W S_e' + A V             S <- (S_e + V' k~ + U' b~) diag(e^(G - m))
//   backwards   dS_e = dS diag(e^(G - m))  Z = T' (b~ dS_e' + Q' dY)    dS <- (dS_e + dY' r~ + Z' a~) diag(e^m)
// The second is the first with b for a, a for b, r for k and dY for v, and triangles turned, as tokens go backwards.
// S_e, U, dS_e and Z of each chunk go to memory: all gradients of a chunk come from them (gradients.cuh).
//
// A block has producers as in chunked.cuh, and consumers that hold 16 values and all keys each: so a warp needs nothing
// from another one but what producers make. All products are split, whatever the inputs: the gradient of `state` is
// float32.
#pragma once

#include "chunked.cuh"

namespace cog_rwkv {

enum Direction { kForwards, kBackwards };

constexpr int kScanProducers = 4, kScanConsumers = 4;
constexpr int kScanThreads = (2 * kScanProducers + kScanConsumers) * kWarp;

// Whether the products of gradients.cuh are split: for bfloat16 they are in tf32, whose error is a quarter of what its
// rounding is, for the gradient of w half.
template <class T>
constexpr bool kSplitGradients = !std::is_same_v<T, BFloat16>;

template <class T>
struct StateScans {
  const T* in[2][6];      // [direction]: each [batch, tokens, heads, 64], in the place of w, k, v, a, b
  const float* begin[2];  // [batch heads, 64, 64]: the state before the first token, the gradient after the last
  float* states[2];       // S_e' and dS_e', [batch heads, chunks, key, value]
  float* removed[2];      // U and Z, [batch heads, chunks, 16, 64]
  float* d_state;         // [batch heads, 64, 64]: what the scan backwards ends with
  int64_t tokens, heads, chunks;
};

// a is scaled by the decays before its token, r by those with it, k and b by the inverse of that.
template <class T, bool reverse>
__device__ __forceinline__ void scale_for_scan(const Slot& slot, int n, Team team) {
  const Corner c{team.lane / 16 * 8, team.part * 32 + team.lane % 16 * 2};
  float factor[9][2];
  sum_decays<T>(factor, slot, n, c);
  if constexpr (reverse) {
    scale<T, true>(slot, {kK, kB}, c, team, [&](int before, int t, int i) { return factor[t + 1 - before][i]; });
  } else {
    scale<T, true>(slot, {kA}, c, team, [&](int, int t, int i) { return factor[t][i]; });
  }
  reciprocals(factor);
  const auto inverse = [&](int, int t, int i) { return factor[t + 1][i]; };
  if constexpr (reverse) {
    scale<T, true>(slot, {kA}, c, team, inverse);
  } else {
    scale<T, true>(slot, {kK, kB}, c, team, inverse);
  }
  team.sync();
}

// sums = x y', of the slot's inputs x and y, as in between_tokens.
__device__ __forceinline__ void multiply_tokens(Sums (&sums)[2], const Slot& slot, Input x, Input y, int lane) {
  const int g = lane / 4, q = lane % 4;
  Sums fine[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const auto keys = [&](Input input, int half) {
      return float4_at(slot.row(input, g + 8 * half) + place(16 * q) + 4 * i);
    };
    const float4 left[2] = {keys(x, 0), keys(x, 1)}, right[2] = {keys(y, 0), keys(y, 1)};
    const Left both[2] = {{left[0].x, left[1].x, left[0].y, left[1].y}, {left[0].z, left[1].z, left[0].w, left[1].w}};
#pragma unroll
    for (int step = 0; step < 2; step++) {
      multiply<true, 2>([&](int half) -> TileProduct {
        const float4 r = right[half];
        return {sums[half], fine[half], both[step], {step ? r.z : r.x, step ? r.w : r.y}};
      });
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i / 4][i % 4] += fine[i / 4][i % 4];
}

// W in the place of a~ and A, as chunked.cuh names them.
template <class T, bool reverse>
__device__ __forceinline__ void make_scan_chunk(const Slot& slot, int n, Team team) {
  scale_for_scan<T, reverse>(slot, n, team);
  float* lower = slot.inverse();
  Sums sums[2] = {};
  multiply_tokens(sums, slot, kA, team.part == 0 ? kB : kK, team.lane);
  if (team.part == 0) {
    store_lower_transposed<reverse>(lower, sums, team.lane);
    invert<true, reverse>(slot.inverse(), lower, team.lane);
  } else {
    store_lower<true, reverse>(slot.removed(), sums, reverse, team.lane);
  }
  team.sync();
  apply_inverse<true>(slot, team);
}

// The chunks of a head in the order of a scan; `turn` counts them.
template <bool reverse>
__device__ __forceinline__ int64_t chunk_of(int64_t turn, int64_t chunks) {
  return reverse ? chunks - 1 - turn : turn;
}

template <bool reverse, class T>
__device__ __forceinline__ void produce_scan(const StateScans<T>& p, int64_t block, int first, int count, Ring slots,
                                             Barriers& barriers, int producer, Team team) {
  const Slot slot = slots.at(producer);
  const int64_t sequence = block / p.heads, head = block % p.heads;
  uint32_t parity = 1;
  for (int64_t turn = producer; turn < p.chunks; turn += slots.count, parity ^= 1) {
    const int64_t t = chunk_of<reverse>(turn, p.chunks) * kChunk;
    const int n = static_cast<int>(min(p.tokens - t, int64_t{kChunk}));
    wait(&barriers.empty[producer], parity);
    start_copies<kW>(p.in[reverse], p.heads, slot, sequence * p.tokens + t, n, head, first, count, team);
    wait_for_copies();
    team.sync();
    make_scan_chunk<T, reverse>(slot, n, team);
    arrive(&barriers.full[producer]);
  }
}

// f(Consumer<part>, s[part]) for the keys of both parts.
template <class F>
__device__ __forceinline__ void both_parts(State (&s)[2], int lane, F f) {
  f(Consumer<0>{lane, 0}, s[0]);
  f(Consumer<1>{lane, 0}, s[1]);
}

// u += S W', as far as the part's keys go.
template <int kPart>
__device__ __forceinline__ void read_part(Tokens (&u)[2], const State& s, const Slot& slot, Consumer<kPart> c) {
  const int g = c.lane / 4, q = c.lane % 4;
  float w[2][2][4];  // [half][column 2 q or 2 q + 1][tile]
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const float4 x = float4_at(slot.row(kA, g + 8 * half) + place(16 * q) + first_key(kPart, odd));
      w[half][odd][0] = x.x, w[half][odd][1] = x.y, w[half][odd][2] = x.z, w[half][odd][3] = x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Left state = {s[i][0], s[i][2], s[i][1], s[i][3]};
    multiply<true, 2>(
        [&](int half) -> TileProduct { return {u[half].sums, u[half].fine, state, {w[half][0][i], w[half][1][i]}}; });
  }
}

// U of a chunk for 16 values, [half]: tokens 8 half to 8 half + 7.
template <bool exact>
__device__ __forceinline__ void find_removed(Sums (&found)[2], State (&s)[2], const Left (&v)[2], const Slot& slot,
                                             int lane) {
  Tokens u[2][2];  // by part
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    multiply<true, 2, exact>([&](int half) -> TileProduct {
      const float2 m = float2_at(slot.removed() + (g + 8 * half) * kSmallRow + 8 * i + 2 * q);
      return {u[i][half].sums, u[i][half].fine, v[i], {m.x, m.y}};
    });
  }
  both_parts(s, lane, [&]<int kPart>(Consumer<kPart> c, State& part) { read_part(u[kPart], part, slot, c); });
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      found[half][i] = (u[0][half].sums[i] + u[1][half].sums[i]) + (u[0][half].fine[i] + u[1][half].fine[i]);
    }
  }
}

// Writes the lane's part of a state, transposed: [keys, values], from the warp's first value on.
template <bool split>
__device__ __forceinline__ void store_transposed(float* to, State (&s)[2], int lane) {
  float* const from_lane = to + lane % 4 * 16 * kHead + lane / 4;
  both_parts(s, lane, [&]<int kPart>(Consumer<kPart>, State& part) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int key = first_key(kPart, i % 2) + i / 4;
      from_lane[key * kHead + i % 4 / 2 * 8] = operand<split>(part[i / 4][i % 4]);
    }
  });
}

// Where S_e and U of a chunk go, from the warp's first value on.
struct ChunkPlaces {
  float *state, *removed;
};

// One chunk: S_e and U go to memory, the state goes on. Tensor cores cut off their sums, so the state, which goes on,
// is none of them.
template <class T, bool reverse>
__device__ __forceinline__ void scan_chunk(State (&s)[2], const ChunkPlaces& to, const Slot& slot, int value,
                                           uint64_t* empty, int lane) {
  constexpr bool exact = sizeof(T) == 2, split = kSplitGradients<T>;
  const float *enter = reverse ? slot.after() : slot.before(), *leave = reverse ? slot.before() : slot.after();
  const auto in_order = [](int i) { return 8 * i; };
  Left v[2], removed[2];
  Sums found[2];
  both_parts(s, lane, [&](auto c, State& part) { scale_state(part, enter, c); });
  store_transposed<split>(to.state, s, lane);
  load_values<T>(v, slot, value, lane);
  find_removed<exact>(found, s, v, slot, lane);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    removed[i][0] = found[i][0], removed[i][1] = found[i][2], removed[i][2] = found[i][1], removed[i][3] = found[i][3];
  }
  both_parts(s, lane, [&](auto c, State& part) {
    State sums = {};
    add_to_state<true, exact>(sums, v, slot, kK, c, in_order);
    add_to_state<true>(sums, removed, slot, kB, c, in_order);
#pragma unroll
    for (int i = 0; i < 16; i++) part[i / 4][i % 4] += sums[i / 4][i % 4];
    scale_state(part, leave, c);
  });
  arrive(empty);
  float* const from_lane = to.removed + lane % 4 * 2 * kHead + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    from_lane[(i / 4 * 8 + i % 2) * kHead + i / 2 % 2 * 8] = operand<split>(found[i / 4][i % 4]);
  }
}

template <bool reverse, class T>
__device__ __forceinline__ void consume_scan(const StateScans<T>& p, int64_t block, Ring slots, Barriers& barriers,
                                             int value, int lane) {
  const int64_t corner = (block * kHead + value) * kHead, chunk = block * p.chunks + (reverse ? p.chunks - 1 : 0);
  State s[2];
  const float* from = p.begin[reverse] + corner;
  both_parts(s, lane, [&](auto c, State& part) { each_element(part, c, [&](float& x, int at) { x = from[at]; }); });
  ChunkPlaces to{p.states[reverse] + chunk * kHead * kHead + value,
                 p.removed[reverse] + chunk * kChunk * kHead + value};
  constexpr int kStep = (reverse ? -1 : 1) * static_cast<int>(kHead);
  int slot = 0;
  uint32_t parity = 0;
  for (int left = static_cast<int>(p.chunks); left > 0; left--) {
    wait(&barriers.full[slot], parity);
    scan_chunk<T, reverse>(s, to, slots.at(slot), value, &barriers.empty[slot], lane);
    to.state += kStep * static_cast<int>(kHead), to.removed += kStep * kChunk;
    if (++slot == slots.count) slot = 0, parity ^= 1;
  }
  if (!reverse) return;
  float* const end = p.d_state + corner;
  both_parts(s, lane, [&](auto c, State& part) { each_element(part, c, [&](float& x, int at) { end[at] = x; }); });
}

template <bool reverse, class T>
__device__ __forceinline__ void scan(const StateScans<T>& p, int64_t block, int first, int consumers, Ring slots,
                                     Barriers& barriers) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp < consumers) return consume_scan<reverse>(p, block, slots, barriers, first + warp * 16, lane);
  const int producer = (warp - consumers) / 2;
  produce_scan<reverse>(p, block, first, consumers * 16, slots, barriers, producer,
                        Team{1 + producer, (warp - consumers) % 2, lane});
}

// A block a sequence, head, share of its values and direction.
template <class T>
__global__ void __launch_bounds__(kScanThreads, 1) wkv7_scan_kernel(const StateScans<T> p, int shares, int producers) {
  extern __shared__ __align__(16) float memory[];
  __shared__ Barriers barriers;
  wait_for_previous();
  let_next_begin();
  const int64_t block = blockIdx.x / 2 / shares;
  const int consumers = kScanConsumers / shares, first = static_cast<int>(blockIdx.x / 2 % shares) * consumers * 16;
  if (threadIdx.x == 0) {
    for (int j = 0; j < producers; j++) {
      init_barrier(&barriers.full[j], 2 * kWarp);
      init_barrier(&barriers.empty[j], kWarp * consumers);
    }
  }
  __syncthreads();  // barrier 0: the pairs have the next ones
  if (blockIdx.x % 2 == kForwards) {
    scan<false>(p, block, first, consumers, Ring{memory, producers}, barriers);
  } else {
    scan<true>(p, block, first, consumers, Ring{memory, producers}, barriers);
  }
}

}  // namespace cog_rwkv

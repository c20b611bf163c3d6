// wkv7 in chunks of 16 tokens on tensor cores, for sequences that are long enough (wkv7.cu chooses).
//
// With g the log-decay summed over the chunk up to a token, and m that sum at the chunk's middle (per key),
//   r~ = r e^(g - m), k~ = k e^(m - g), b~ = b e^(m - g), and a~ = a e^(g' - m), g' the sum before the token,
// the chunk is a few products of matrices (tril: the lower triangle; -1: without the diagonal):
//   T = (I - tril(a~ b~', -1))^-1    W = T a~    A = T tril(a~ k~', -1)    P = tril(r~ k~')    Q = tril(r~ b~')
//   S <- S diag(e^m)    U = W S' + A V    Y = r~ S' + P V + Q U    S <- (S + V' k~ + U' b~) diag(e^(G - m))
// Measured from the middle, no factor leaves [2^-7, 2^7], as a decay is at least 0.5452. T comes by substitution, in
// float32: repeated squaring fails where keys are alike. Everything else is a product of bfloat16 in parts
// (csrc/mma.cuh): 3 for inputs in float32, whose error is then that of float32 arithmetic, 2 for those of 16 bits.
//
// Only the last line needs the state, so a block has two kinds of warps. Producers take chunks in turn and leave in
// shared memory what does not depend on the state; consumers hold it, 16 values each, and follow one chunk behind the
// other. Values do not meet: where there are few heads, several blocks share one, each with some of its values.
#pragma once

#include <type_traits>

#include "../csrc/mma.cuh"
#include "work.cuh"

namespace cog_rwkv {

constexpr int kChunk = 16;
constexpr int kMaxProducers = 4;  // as many slots: each producer fills its own
constexpr int kWarp = 32;

template <class T>
constexpr int kParts = sizeof(T) == 4 ? 3 : 2;

// A slot of shared memory, for a chunk. Rows of 64 keys or values, and of 16 tokens: the parts of a row, and 16 bytes
// against bank conflicts.
template <int parts>
struct Slot {
  static constexpr int kPart = 128, kRow = parts * kPart + 16, kMatrix = kChunk * kRow;
  static constexpr int kSmallPart = 32, kSmallRow = parts * kSmallPart + 16, kSmall = kChunk * kSmallRow;
  static constexpr int kBytes = 6 * kMatrix + kSmall + 2 * kHead * sizeof(float);

  char* base;
  // The inputs lie in the order of `Input`; each is turned into parts where it lies, and a into W.
  __device__ char* matrix(int input) const { return base + input * kMatrix; }
  // In the place of w, once that is summed.
  __device__ char* from_values() const { return matrix(kW); }                                         // P
  __device__ char* from_removed() const { return matrix(kW) + kSmall; }                               // Q
  __device__ char* to_removed() const { return matrix(kW) + 2 * kSmall; }                             // A
  __device__ char* inverse() const { return base + 6 * kMatrix; }                                     // T
  __device__ float* before() const { return reinterpret_cast<float*>(base + 6 * kMatrix + kSmall); }  // e^m
  __device__ float* after() const { return before() + kHead; }                                        // e^(G - m)

  __device__ uint32_t tile(int input, int lane) const { return tile_address(matrix(input), kRow, lane); }
  __device__ static uint32_t small_tile(const char* matrix, int lane) { return tile_address(matrix, kSmallRow, lane); }
};

// What registers are shared out among: a large block, or two small ones, on a multiprocessor.
template <class T>
constexpr int kChunkedThreads = sizeof(T) == 4 ? 384 : 512;

struct Barriers {
  uint64_t full[kMaxProducers], empty[kMaxProducers];
};

// Where in a row the inputs are put before they are turned into parts: those of 16 bits behind the first part.
template <class T>
constexpr int kRaw = sizeof(T) == 2 ? 128 : 0;

// Starts copying n tokens of a head; zeros for the rest of the chunk. Of v, the values first to first + count alone.
template <class T>
__device__ __forceinline__ void start_copies(const Wkv7<T, void>& p, const Slot<kParts<T>>& slot, int64_t token, int n,
                                             int64_t head, int first, int count, int lane) {
  using Place = Slot<kParts<T>>;
  constexpr int kPer16 = 16 / sizeof(T), kPieces = kHead / kPer16;
  for (int i = lane; i < kChunk * kPieces; i += kWarp) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool inside = row < n;
    const int64_t at = ((token + (inside ? row : 0)) * p.heads + head) * kHead + piece * kPer16;
    char* to = slot.base + row * Place::kRow + kRaw<T> + piece * 16;
    const bool wanted = piece * kPer16 >= first && piece * kPer16 < first + count;
#pragma unroll
    for (int input = 0; input < 6; input++) {
      if (input != kV || wanted) copy16(to + input * Place::kMatrix, p.in[input] + at, inside);
    }
  }
}

// Two neighbours of row t, for this lane, as they were copied.
template <class T>
__device__ __forceinline__ float2 raw_pair(const char* matrix, int t, int lane) {
  const char* at = matrix + t * Slot<kParts<T>>::kRow + kRaw<T> + lane * 2 * sizeof(T);
  const Vector<T, 2> x = load_vector<T, 2>(reinterpret_cast<const T*>(at));
  return make_float2(static_cast<float>(x.values[0]), static_cast<float>(x.values[1]));
}

template <int parts>
__device__ __forceinline__ void store_pair(char* matrix, int t, int lane, float2 x) {
  const Pair<parts> p = split<parts>(x.x, x.y);
#pragma unroll
  for (int i = 0; i < parts; i++)
    *reinterpret_cast<uint32_t*>(matrix + t * Slot<parts>::kRow + i * Slot<parts>::kPart + lane * 4) = p.part[i];
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 of the decay.
__device__ __forceinline__ float log2_decay(float w) {
  return __fdividef(-0.87503876f, 1.0f + exp2_fast(-1.44269504f * w));  // e^-0.5 / ln 2
}

__device__ __forceinline__ float2 exp2_difference(float2 a, float2 b) {
  return make_float2(exp2_fast(a.x - b.x), exp2_fast(a.y - b.y));
}

// g for the lane's two keys; what follows the n tokens decays no more.
template <class T>
__device__ __forceinline__ void sum_decays(float2 (&g)[kChunk], const char* matrix, int n, int lane) {
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < kChunk; t++) {
    const float2 w = raw_pair<T>(matrix, t, lane);
    if (t < n) {
      sum.x += log2_decay(w.x);
      sum.y += log2_decay(w.y);
    }
    g[t] = sum;
  }
}

// Turns an input into pairs, eight rows at a time, as no lane may write a row that another has not read yet.
// factor(t): what row t is multiplied with.
template <class T, class Factor>
__device__ __forceinline__ void scale(char* matrix, int lane, Factor factor) {
#pragma unroll
  for (int half = 0; half < kChunk; half += 8) {
    float2 x[8];
#pragma unroll
    for (int t = 0; t < 8; t++) x[t] = raw_pair<T>(matrix, half + t, lane);
    __syncwarp();
#pragma unroll
    for (int t = 0; t < 8; t++) {
      const float2 f = factor(half + t);
      store_pair<kParts<T>>(matrix, half + t, lane, make_float2(x[t].x * f.x, x[t].y * f.y));
    }
  }
}

template <class T>
__device__ __forceinline__ void scale_inputs(const Slot<kParts<T>>& slot, int n, int lane) {
  float2 g[kChunk];
  sum_decays<T>(g, slot.matrix(kW), n, lane);
  const float2 m = g[kChunk / 2 - 1];
  const float2 zero = make_float2(0.0f, 0.0f);
  reinterpret_cast<float2*>(slot.before())[lane] = exp2_difference(m, zero);
  reinterpret_cast<float2*>(slot.after())[lane] = exp2_difference(g[kChunk - 1], m);
  scale<T>(slot.matrix(kR), lane, [&](int t) { return exp2_difference(g[t], m); });
  scale<T>(slot.matrix(kA), lane, [&](int t) { return exp2_difference(t > 0 ? g[t - 1] : zero, m); });
  scale<T>(slot.matrix(kK), lane, [&](int t) { return exp2_difference(m, g[t]); });
  scale<T>(slot.matrix(kB), lane, [&](int t) { return exp2_difference(m, g[t]); });
  // Where a block has some of the values alone, the others were not copied: nobody reads what they become.
  scale<T>(slot.matrix(kV), lane, [](int) { return make_float2(1.0f, 1.0f); });
  __syncwarp();
}

// The lower triangle of rows and columns of tokens, without its diagonal or with it.
__device__ __forceinline__ void keep_lower(Sums& x, int column, bool diagonal, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, at = column + lane % 4 * 2 + i % 2;
    if (at > row || (at == row && !diagonal)) x[i] = 0.0f;
  }
}

// a~ b~', a~ k~', r~ b~' and r~ k~', their triangles. The first goes into `lower`, transposed, in float32.
template <int parts>
__device__ __forceinline__ void between_tokens(const Slot<parts>& slot, float* lower, int lane) {
  Sums ab[2] = {}, ak[2] = {}, rb[2] = {}, rk[2] = {};
#pragma unroll
  for (int key = 0; key < kHead; key += 16) {
    const auto tile = [&](int input) { return load_tile<parts>(slot.tile(input, lane) + key * 2, slot.kPart); };
    const Tile<parts> a = tile(kA), r = tile(kR), b = tile(kB), k = tile(kK);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      multiply(ab[half], a, right(b, half));
      multiply(ak[half], a, right(k, half));
      multiply(rb[half], r, right(b, half));
      multiply(rk[half], r, right(k, half));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = half * 8;
    keep_lower(ab[half], column, false, lane);
    keep_lower(ak[half], column, false, lane);
    keep_lower(rb[half], column, true, lane);
    keep_lower(rk[half], column, true, lane);
    store_sums<parts>(slot.from_values() + column * 2, slot.kSmallRow, slot.kSmallPart, rk[half], lane);
    store_sums<parts>(slot.from_removed() + column * 2, slot.kSmallRow, slot.kSmallPart, rb[half], lane);
    store_sums<parts>(slot.to_removed() + column * 2, slot.kSmallRow, slot.kSmallPart, ak[half], lane);
    for (int i = 0; i < 4; i++) lower[(column + lane % 4 * 2 + i % 2) * kChunk + lane / 4 + i / 2 * 8] = ab[half][i];
  }
  __syncwarp();
}

// (I - L)^-1 for L transposed in `lower`, which lies where the result goes. A lane has a column, both halves the same.
template <int parts>
__device__ __forceinline__ void invert(const Slot<parts>& slot, const float* lower, int lane) {
  const int column = lane % 16;
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i++) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j + 1 < kChunk; j++) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < kChunk; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + j * kChunk + i);  // zero up to the diagonal
      x[i] += i > j ? l.x * x[j] : 0.0f;
      x[i + 1] += i + 1 > j ? l.y * x[j] : 0.0f;
      x[i + 2] += i + 2 > j ? l.z * x[j] : 0.0f;
      x[i + 3] += l.w * x[j];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    const Pair<parts> p = split<parts>(x[i], x[i + 1]);
#pragma unroll
    for (int j = 0; j < parts; j++) {
      if (j % 2 != lane / 16) continue;  // the parts shared out between the two halves of the warp
      char* to = slot.inverse() + i * slot.kSmallRow + j * slot.kSmallPart + column * 2;
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(p.part[j]);
      *reinterpret_cast<uint16_t*>(to + slot.kSmallRow) = static_cast<uint16_t>(p.part[j] >> 16);
    }
  }
  __syncwarp();
}

// T a~ in the place of a~, T tril(a~ k~', -1) in the place of the triangle.
template <int parts>
__device__ __forceinline__ void apply_inverse(const Slot<parts>& slot, int lane) {
  const auto inverse = load_tile<parts>(slot.small_tile(slot.inverse(), lane), slot.kSmallPart);
  const auto keys = load_tile_transposed<parts>(slot.small_tile(slot.to_removed(), lane), slot.kSmallPart);
  Sums small[2] = {}, wide[8] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) multiply(small[half], inverse, right_transposed(keys, half));
#pragma unroll
  for (int key = 0; key < kHead; key += 16) {
    const auto a = load_tile_transposed<parts>(slot.tile(kA, lane) + key * 2, slot.kPart);
#pragma unroll
    for (int half = 0; half < 2; half++) multiply(wide[key / 8 + half], inverse, right_transposed(a, half));
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; half++)
    store_sums<parts>(slot.to_removed() + half * 16, slot.kSmallRow, slot.kSmallPart, small[half], lane);
#pragma unroll
  for (int i = 0; i < 8; i++) store_sums<parts>(slot.matrix(kA) + i * 16, slot.kRow, slot.kPart, wide[i], lane);
}

// A head of a sequence, and the block's share of it: values first to first + count.
struct Share {
  Sequence sequence;
  int64_t head;
  int first, count;
};

template <class T>
__device__ __forceinline__ void produce(const Wkv7<T, void>& p, const Share& s, char* slots, Barriers& barriers,
                                        int producers, int producer, int lane) {
  const Slot<kParts<T>> slot{slots + producer * Slot<kParts<T>>::kBytes};
  uint32_t parity = 1;
  const int64_t step = static_cast<int64_t>(producers) * kChunk;
  for (int64_t t = s.sequence.begin + producer * kChunk; t < s.sequence.end; t += step, parity ^= 1) {
    const int n = static_cast<int>(min(s.sequence.end - t, int64_t{kChunk}));
    wait(&barriers.empty[producer], parity);
    start_copies(p, slot, t, n, s.head, s.first, s.count, lane);
    wait_for_copies();
    __syncwarp();
    scale_inputs<T>(slot, n, lane);
    float* lower = reinterpret_cast<float*>(slot.inverse());
    between_tokens(slot, lower, lane);
    invert(slot, lower, lane);
    apply_inverse(slot, lane);
    __syncwarp();
    if (lane == 0) arrive(&barriers.full[producer]);
  }
}

// 16 values of the state: s[j] has the keys 8 j to 8 j + 7.
using State = Sums[8];

__device__ __forceinline__ void scale_state(State& s, const float* factors, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 f = *reinterpret_cast<const float2*>(factors + j * 8 + lane % 4 * 2);
    s[j][0] *= f.x;
    s[j][1] *= f.y;
    s[j][2] *= f.x;
    s[j][3] *= f.y;
  }
}

// y[half] and u[half]: their tokens 8 half to 8 half + 7, in rows of values. Sums of S a~' and of S r~', with what
// comes from the values of the chunk. The products of lesser parts have sums of their own: shorter chains.
template <bool exact, int parts>
__device__ __forceinline__ void read_state(Sums (&u)[2], Sums (&y)[2], const State& s, const Tile<parts>& v,
                                           const Slot<parts>& slot, int lane) {
  Sums fine_u[2] = {}, fine_y[2] = {};
  const auto values = load_tile<parts>(slot.small_tile(slot.to_removed(), lane), slot.kSmallPart);
  const auto seen = load_tile<parts>(slot.small_tile(slot.from_values(), lane), slot.kSmallPart);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    multiply<parts, exact>(u[half], fine_u[half], v, right(values, half));
    multiply<parts, exact>(y[half], fine_y[half], v, right(seen, half));
  }
#pragma unroll
  for (int key = 0; key < kHead; key += 16) {
    const auto state = left_of<parts>(s[key / 8], s[key / 8 + 1]);
    const auto w = load_tile<parts>(slot.tile(kA, lane) + key * 2, slot.kPart);
    const auto r = load_tile<parts>(slot.tile(kR, lane) + key * 2, slot.kPart);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      multiply(u[half], fine_u[half], state, right(w, half));
      multiply(y[half], fine_y[half], state, right(r, half));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u[half][i] += fine_u[half][i];
      y[half][i] += fine_y[half][i];
    }
  }
}

// s += x m, for x [16 values, 16 tokens] and the keys m of the tokens.
template <bool exact, int parts>
__device__ __forceinline__ void add_to_state(State& s, const Tile<parts>& x, const Slot<parts>& slot, int input,
                                             int lane) {
#pragma unroll
  for (int key = 0; key < kHead; key += 16) {
    const auto m = load_tile_transposed<parts>(slot.tile(input, lane) + key * 2, slot.kPart);
#pragma unroll
    for (int half = 0; half < 2; half++) multiply<parts, exact>(s[key / 8 + half], x, right_transposed(m, half));
  }
}

// Writes y of n tokens and this warp's 16 values, by way of the place in which v of these values lay: half of a row in
// its first part, half in its second, in float32.
template <class T>
__device__ __forceinline__ void write_y(T* to, int64_t stride, char* v, const Sums (&y)[2], int n, int lane) {
  using Place = Slot<kParts<T>>;
  __syncwarp();
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = half * 8 + q * 2 + i % 2;
      *reinterpret_cast<float*>(v + token * Place::kRow + (i < 2 ? 0 : Place::kPart) + g * 4) = y[half][i];
    }
  }
  __syncwarp();
  const int token = lane / 2, part = lane % 2;
  if (token >= n) return;
  const float4* from = reinterpret_cast<const float4*>(v + token * Place::kRow + part * Place::kPart);
  const float4 x[2] = {from[0], from[1]};
  constexpr int kPer16 = 16 / sizeof(T);
  T* at = to + token * stride + part * 8;
  const float values[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
  for (int i = 0; i < 8; i += kPer16) {
    Vector<T, kPer16> rounded;
#pragma unroll
    for (int j = 0; j < kPer16; j++) rounded.values[j] = static_cast<T>(values[i + j]);
    store_vector<T, kPer16>(at + i, rounded);
  }
}

// f(i, value, key) for the four elements that this lane has of s[i / 4]; 0 is the first value of the warp.
template <class F>
__device__ __forceinline__ void each_element(int lane, F f) {
#pragma unroll
  for (int i = 0; i < 32; i++) f(i, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
}

// f(Type<S>{}), S the dtype of the states.
template <class F>
__device__ __forceinline__ void with_state_type(ScalarType type, F f) {
  if (type == ScalarType::Float) return f(Type<float>{});
  if (type == ScalarType::Half) return f(Type<Half>{});
  f(Type<BFloat16>{});
}

template <class T>
__device__ __forceinline__ void consume(const Wkv7<T, void>& p, ScalarType state_type, const Share& share, char* slots,
                                        Barriers& barriers, int producers, int consumer, int lane) {
  constexpr int parts = kParts<T>;
  constexpr bool exact = std::is_same_v<T, BFloat16>;  // v is its own first part
  const int value = share.first + consumer * 16;
  const int64_t corner = (share.head * kHead + value) * kHead;
  State s;
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    const S* from = static_cast<const S*>(p.state) + share.sequence.row * p.in_stride + corner;
    each_element(lane, [&](int i, int v, int key) { s[i / 4][i % 4] = static_cast<float>(from[v * kHead + key]); });
  });
  int place = 0;
  uint32_t parity = 0;
  const int64_t stride = p.heads * kHead;
  for (int64_t t = share.sequence.begin; t < share.sequence.end; t += kChunk) {
    const int n = static_cast<int>(min(share.sequence.end - t, int64_t{kChunk}));
    const Slot<parts> slot{slots + place * Slot<parts>::kBytes};
    wait(&barriers.full[place], parity);
    scale_state(s, slot.before(), lane);
    const auto v = left_transposed(load_tile_transposed<parts>(slot.tile(kV, lane) + value * 2, slot.kPart));
    Sums u[2] = {}, y[2] = {};
    read_state<exact>(u, y, s, v, slot, lane);
    add_to_state<exact>(s, v, slot, kK, lane);
    const auto removed = left_of<parts>(u[0], u[1]);
    add_to_state<false>(s, removed, slot, kB, lane);
    const auto seen = load_tile<parts>(slot.small_tile(slot.from_removed(), lane), slot.kSmallPart);
#pragma unroll
    for (int half = 0; half < 2; half++) multiply(y[half], removed, right(seen, half));
    scale_state(s, slot.after(), lane);
    write_y(p.y + t * stride + share.head * kHead + value, stride, slot.matrix(kV) + value * 2, y, n, lane);
    __syncwarp();
    if (lane == 0) arrive(&barriers.empty[place]);
    if (++place == producers) place = 0, parity ^= 1;
  }
  with_state_type(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    S* to = static_cast<S*>(p.state_out) + share.sequence.row * p.out_stride + corner;
    each_element(lane, [&](int i, int v, int key) { to[v * kHead + key] = static_cast<S>(s[i / 4][i % 4]); });
  });
}

// A block a sequence, head and share of its values: 4 / shares consumers and then `producers` producers.
template <class T>
__global__ void __launch_bounds__(kChunkedThreads<T>)
    wkv7_chunked_kernel(const Wkv7<T, void> p, ScalarType state_type, int shares, int producers) {
  extern __shared__ __align__(16) char slots[];
  __shared__ Barriers barriers;
  const int64_t count = p.heads * shares, i = blockIdx.x / count;
  const int part = static_cast<int>(blockIdx.x % count);
  const int consumers = 4 / shares, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int values = static_cast<int>(kHead) / shares;
  const Share share{sequence_of_block(p, i), part / shares, part % shares * values, values};
  if (!share.sequence.row_ok || !p.takes(share.sequence)) return;
  if (threadIdx.x == 0) {
    for (int j = 0; j < producers; j++) {
      init_barrier(&barriers.full[j], 1);
      init_barrier(&barriers.empty[j], consumers);
    }
  }
  __syncthreads();
  if (warp < consumers) {
    consume(p, state_type, share, slots, barriers, producers, warp, lane);
  } else {
    produce(p, share, slots, barriers, producers, warp - consumers, lane);
  }
}

}  // namespace cog_rwkv

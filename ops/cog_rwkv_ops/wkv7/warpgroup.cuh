// wkv7 in chunks by wgmma: a head of a sequence in a block, whose first four warps follow the chunks with the whole
// state while pairs of warps prepare them.
//
// All of it is in tf32, like chunked.cuh for 16-bit inputs. The state's rows, values, are the rows of the products, and
// its 32 numbers a thread are at once the sums of one product and the left operand of the next. With the state from
// the chunk before, a chunk is three steps that wait for each other: U and y of the state (W, r^), the state of U (b^).
// What else there is, y of U and the state of v, runs beside them.
#pragma once

#include "../csrc/mma16.cuh"
#include "../csrc/tma.cuh"
#include "../csrc/wgmma_tf32.cuh"
#include "chunked.cuh"
#include "prepare.cuh"

namespace cog_rwkv {

constexpr int kGroup = 4;      // warps of a warp group
constexpr int kPreparers = 6;  // pairs, each with tiles of its own
constexpr int kGroupThreads = (kGroup + 2 * kPreparers) * kWarp;
constexpr int kOutRow = 48,
              kOutBytes = 2 * kGroup * kChunk * kOutRow;  // y of a warp's 16 values: bytes a token, in all
constexpr int kGroupBytes = kPreparers * Tiles::kBytes + kOutBytes;

constexpr int kFollowerRegisters = 136, kPreparerRegisters = 120;  // of 128 at first

#if COG_RWKV_WGMMA
// 16 values a warp, by 64 keys: of tile j, s[4 j + e + 2 upper] is value g + 8 upper and column 8 j + 2 q + e.
using WholeState = float[32];

// f(keys of value `value`, from key `key` on): x, y, z, w of four keys, for all that this lane has.
template <class F>
__device__ __forceinline__ void each_four_keys(WholeState& s, int lane, F f) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int upper = i / 4, part = i / 2 % 2, odd = i % 2;
    float* const first = s + 4 * (4 * part + odd) + 2 * upper;  // the second key is two tiles further, the third next
    f(first[0], first[8], first[1], first[9], g + 8 * upper, 32 * part + 16 * odd + 4 * q);
  }
}

__device__ __forceinline__ uint32_t to_tf32(float x) { return __float_as_uint(operand<false>(x)); }

// Sums of so many tiles of eight columns as left operands.
template <int COUNT>
__device__ __forceinline__ void to_operands(uint32_t (&left)[COUNT][4], const float* sums) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    left[i][0] = to_tf32(sums[4 * i]), left[i][1] = to_tf32(sums[4 * i + 2]);
    left[i][2] = to_tf32(sums[4 * i + 1]), left[i][3] = to_tf32(sums[4 * i + 3]);
  }
  operands_ready(left);
}

// v of the warp's 16 values, as left operands of two steps.
template <class T>
__device__ __forceinline__ void load_values(uint32_t (&v)[2][4], const Tiles& tiles, int warp, int lane) {
  uint32_t two[4];  // values g and g + 8 of tokens 2 q and 2 q + 1, then of tokens 8 + 2 q and 9 + 2 q
  const int token = lane / 16 * 8 + lane % 8, value = 16 * warp + lane / 8 % 2 * 8;
  load_matrices<true>(two, shared_address(&tiles.at<T>(Tiles::kValues + token * Tiles::kValueRow + value * 2)));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const auto x = __builtin_bit_cast(Vector<T, 2>, two[i]);
    v[i / 2][i % 2] = __float_as_uint(static_cast<float>(x.values[0]));
    v[i / 2][i % 2 + 2] = __float_as_uint(static_cast<float>(x.values[1]));
  }
  operands_ready(v);
}

// Stores what load_matrices<true> loads.
__device__ __forceinline__ void store_matrices_wide(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// y of a chunk, rounded, on its way out.
struct Out {
  uint32_t two[4];
  int n;  // tokens; 0: none is on its way

  template <class T>
  __device__ __forceinline__ void take(const float* y, int tokens) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      two[i] = __builtin_bit_cast(uint32_t, Vector<T, 2>{{static_cast<T>(y[2 * i]), static_cast<T>(y[2 * i + 1])}});
    }
    n = tokens;
  }

  // `to` is where the first token's 16 values of this warp belong, `room` shared memory for them.
  template <class T>
  __device__ __forceinline__ void send(T* to, int64_t stride, unsigned char* room, int lane) {
    __syncwarp();
    store_matrices_wide(shared_address(room + (lane / 16 * 8 + lane % 8) * kOutRow + lane / 8 % 2 * 16), two);
    __syncwarp();
    const int token = lane / 2, half = lane % 2;
    const uint4 x = *reinterpret_cast<const uint4*>(room + token * kOutRow + half * 16);
    if (token < n) *reinterpret_cast<uint4*>(to + token * stride + half * 8) = x;
  }
};

// One chunk: y of it, and the state goes on. `left` is the state as operands, before and after. `beside()` runs while
// the first products do.
template <class T, bool passes, class F>
__device__ __forceinline__ void step_state(WholeState& s, uint32_t (&left)[8][4], float (&d)[16], const Tiles& tiles,
                                           int warp, int lane, F beside) {
  const uint64_t tile = descriptor(shared_address(tiles.base));
  const auto at = [&](int byte) { return tile + byte / 16; };
  uint32_t v[2][4], removed[2][4];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 decay = tiles.at<const float2>(Tiles::kDecay + (8 * j + lane % 4 * 2) * 4);
    s[4 * j] *= decay.x, s[4 * j + 1] *= decay.y, s[4 * j + 2] *= decay.x, s[4 * j + 3] *= decay.y;
  }
  wgmma_fence();
  wgmma_tf32<true>(d, left[0], at(Tiles::kRead));
#pragma unroll
  for (int i = 1; i < 8; i++) wgmma_tf32<false>(d, left[i], at(Tiles::kRead + i / 4 * Tiles::kTile + i % 4 * 32));
  if constexpr (passes) {
    wgmma_commit();
    beside();
    wait_wgmma<0>();
  } else {
    load_values<T>(v, tiles, warp, lane);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; i++) wgmma_tf32<false>(d, v[i], at(Tiles::kSmall + 32 * i));
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 2; i++) wgmma_tf32<false>(s, v[i], at(Tiles::kWrite + 32 * i));
    wgmma_commit();
    beside();
    wait_wgmma<1>();
  }
  sums_ready(d);
  operands_read(left);
  to_operands(removed, d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2; i++) wgmma_tf32<false>(s, removed[i], at(Tiles::kWrite + 64 + 32 * i));
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 2; i++) wgmma_tf32<false>(d, removed[i], at(Tiles::kSmall + Tiles::kQ + 32 * i));
  wgmma_commit();
  wait_wgmma<1>();
  sums_ready(s);
  to_operands(left, s);
  wait_wgmma<0>();
  sums_ready(d);
  if constexpr (!passes) operands_read(v);
  operands_read(removed);
}

// What a block has in shared memory: tiles of each pair that prepares chunks, and y of each warp that follows them.
struct Room {
  unsigned char* memory;
  Barriers* barriers;
  int pairs;
};

// Whose turn it is to have prepared a chunk, from head to head.
struct Turn {
  int pair = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int pairs) {
    if (++pair == pairs) pair = 0, parity ^= 1;
  }
};

// A warp group: a state from chunk to chunk. `passes`: without v. `out` is y or what is passed on, [tokens, heads, 64].
template <class T, bool passes, class Y>
__device__ __forceinline__ void follow_chunks(WholeState& s, const Share& share, Y* out, int64_t heads,
                                              const Room& room, Turn& turn, int warp, int lane) {
  const int row = warp % kGroup;
  const int64_t stride = heads * kHead;
  unsigned char* const mine = room.memory + kPreparers * Tiles::kBytes + warp * kChunk * kOutRow;
  Y* to = out + (share.sequence.begin * heads + share.head) * kHead + 16 * row;
  uint32_t left[8][4];
  to_operands(left, s);
  Out sent{{}, 0};
  for (int64_t t = share.sequence.begin; t < share.sequence.end; t += kChunk, turn.next(room.pairs)) {
    const Tiles tiles{room.memory + turn.pair * Tiles::kBytes};
    float d[16];
    wait(&room.barriers->full[turn.pair], turn.parity);
    step_state<T, passes>(s, left, d, tiles, row, lane, [&] { sent.send(to - kChunk * stride, stride, mine, lane); });
    arrive(&room.barriers->empty[turn.pair]);
    sent.template take<Y>(d + 8, static_cast<int>(min(share.sequence.end - t, int64_t{kChunk})));
    to += kChunk * stride;
  }
  sent.send(to - kChunk * stride, stride, mine, lane);
}

// Brings the inputs of a later chunk into L2, as far as there are any.
template <class T>
__device__ __forceinline__ void fetch_ahead(const Wkv7<T, void>& p, const Share& share, int64_t token, Team team) {
  for (int j = team.part * kWarp + team.lane; j < 6 * kChunk; j += 2 * kWarp) {
    const int64_t t = token + j / 6;
    if (t < share.sequence.end) prefetch_l2(p.in[j % 6] + (t * p.heads + share.head) * kHead);
  }
}

// A pair of warps: every so-many-th chunk. `before` chunks were prepared by all pairs until now.
template <class T>
__device__ __forceinline__ void prepare_chunks(const Wkv7<T, void>& p, const Share& share, const Room& room, int before,
                                               uint32_t& parity, int pair, Team team) {
  const Tiles tiles{room.memory + pair * Tiles::kBytes};
  const int64_t step = int64_t{kChunk} * room.pairs;
  const int first = (pair + room.pairs - before % room.pairs) % room.pairs;
  for (int64_t t = share.sequence.begin + first * kChunk; t < share.sequence.end; t += step, parity ^= 1) {
    const int n = static_cast<int>(min(share.sequence.end - t, int64_t{kChunk}));
    wait(&room.barriers->empty[pair], parity);
    start_copies(p, tiles, t, n, share.head, team);
    fetch_ahead(p, share, t + step, team);
    wait_for_copies();
    team.sync();
    make_chunk<T>(tiles, n, team);
    fence_copies();  // wgmma reads what was stored here
    arrive(&room.barriers->full[pair]);
  }
}
#endif

}  // namespace cog_rwkv

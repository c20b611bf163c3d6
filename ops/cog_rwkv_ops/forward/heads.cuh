// All that happens inside a head while one token of each sequence is read: the keys and the in-context rate made
// ready, the WKV-7 step, the group norm, the bonus and the gate. (time_mix_prepare, wkv7_ and time_mix_output in one.)
//
// The states are nearly all of the traffic. A team of nine warps stays with a head and walks over tokens: eight work on
// the state of one while those of the next are on their way to shared memory, and the ninth makes the next token's
// inputs ready and finishes the one before.
#pragma once

#include "../csrc/ahead.cuh"
#include "../wkv7/stepwise.cuh"
#include "prepare.cuh"
#include "ranks.cuh"

namespace cog_rwkv {

constexpr int kStepThreads = 256, kHeadThreads = kStepThreads + 32;  // of a team

// That fit a multiprocessor, by their registers.
template <class S>
constexpr int kHeadBlocks = sizeof(S) == 2 ? 4 : 3;

// Of the next tokens' states, as many are on their way: 32 KB a team.
template <class S>
constexpr uint32_t kStatesAhead = 8 / sizeof(S);

template <class S>
constexpr uint32_t kStateBytes = kHead * kHead * sizeof(S);

// The tokens of a team: every `step`th from `begin` on. A block has those from `first` to `end` - 1.
struct TokenWalk {
  uint32_t first, begin, end, step;
};

// W is the dtype of the activations, S that of the states.
template <class W, class S>
struct HeadStep {
  const W *r, *w, *k, *v, *a, *g, *v_mix;        // [n, heads, 64], before tanh', sigmoid and the like; v_mix null
  W* v_first;                                    // in the first layer, where v_first is written; else it is read
  const float *w0, *a0, *v0;                     // [heads, 64], to be added to w, a and v_mix
  const float *k_k, *k_a, *r_k, *weight, *bias;  // [heads, 64]
  S* state;                                      // rows of [heads, 64, 64], `stride` apart
  const int64_t* rows;                           // [n]
  W* out;                                        // [n, heads, 64]
  int64_t heads, pool_rows, stride;
  float eps;
};

// What the warps of a block hand to each other, float32: two of each, for tokens in turn.
struct HeadShared {
  float in[2][6][kHead];  // as work.cuh numbers them: r, decay, k, v, -kk, kk * a
  float y[2][kHead];
};

// A thread has eight keys of two values, `kHalf` apart: `sizeof(S)` pieces of 16 bytes. Eight neighbouring threads have
// a value's 64 keys, and read and write them as whole lines.
template <class S>
struct StatePieces {
  static constexpr int kHalf = 32, kPer = 16 / sizeof(S), kParts = 8 / kPer;  // values in a piece; pieces of eight keys
  uint4 pieces[sizeof(S)];

  // Of thread `thread` of a team, in a head's state.
  static __device__ __forceinline__ int offset(int thread) { return thread / 8 * kHead + thread % 8 * kPer; }
  static __device__ __forceinline__ int piece(int i) { return i / kParts * kHalf * kHead + i % kParts * 32; }

  // Where the inputs of a key are kept, so that the eight threads find four of theirs side by side.
  static __device__ __forceinline__ int place(int key) {
    return kParts == 2 ? key : key / 4 % 2 * 32 + key / 8 * 4 + key % 4;
  }

  // Nobody reads them again, so not through the cache of the multiprocessor.
  __device__ __forceinline__ void load(const S* from) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(S)); i++)
      pieces[i] = __ldcg(reinterpret_cast<const uint4*>(from + piece(i)));
  }

  // By way of shared memory, some time before they are needed. A thread copies what it takes itself, so that no barrier
  // is needed.
  static __device__ __forceinline__ void begin_copy(unsigned char* to, const S* from) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(S)); i++) copy_ahead<16>(to + i * kStepThreads * 16, from + piece(i));
  }
  __device__ __forceinline__ void take(const unsigned char* from) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(S)); i++) {
      pieces[i] = *reinterpret_cast<const uint4*>(from + i * kStepThreads * 16);
    }
  }
  __device__ __forceinline__ void store(S* to) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(S)); i++) *reinterpret_cast<uint4*>(to + piece(i)) = pieces[i];
  }

  // Four keys, `part` 0 or 1, of value 0 or 1.
  __device__ __forceinline__ Vector<S, 4>& four(int value, int part) {
    return reinterpret_cast<Vector<S, 4>*>(pieces)[value * 2 + part];
  }
  __device__ __forceinline__ float4 get(int value, int part) {
    const Vector<S, 4>& v = four(value, part);
    return make_float4(v.values[0], v.values[1], v.values[2], v.values[3]);
  }
  __device__ __forceinline__ void set(int value, int part, float4 x) {
    four(value, part) = {static_cast<S>(x.x), static_cast<S>(x.y), static_cast<S>(x.z), static_cast<S>(x.w)};
  }
};

// All threads of team `team`.
template <int TEAMS>
__device__ __forceinline__ void team_barrier(int team) {
  static_assert(TEAMS <= 2);
  if constexpr (TEAMS == 1) {
    __syncthreads();
  } else if (team == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(kHeadThreads) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(kHeadThreads) : "memory");
  }
}

// The eight warps: the recurrence. `ring`: of the team, for as many states as are on their way. The first ones do not
// depend on the kernel before, so they are copied before `begin`, which waits for that.
template <int TEAMS, class W, class S, class Begin>
__device__ __forceinline__ void step_states(const HeadStep<W, S>& p, HeadShared& shared, unsigned char* ring, int team,
                                            const TokenWalk& walk, Begin begin) {
  constexpr uint32_t ahead = kStatesAhead<S>;
  const int thread = threadIdx.x - team * kHeadThreads, value = thread / 8, eighth = thread % 8;
  S* const states = p.state + blockIdx.x * int64_t{kHead * kHead} + StatePieces<S>::offset(thread);
  unsigned char* const own = ring + thread * 16;
  const auto row_of = [&](uint32_t token) { return token < walk.end ? p.rows[token] : -1; };
  const auto ok = [&](int64_t row) { return static_cast<uint64_t>(row) < static_cast<uint64_t>(p.pool_rows); };
#pragma unroll
  for (uint32_t i = 0; i < ahead; i++) {
    const int64_t row = row_of(walk.begin + i * walk.step);
    if (ok(row)) StatePieces<S>::begin_copy(own + i * kStateBytes<S>, states + row * p.stride);
    end_group();
  }
  int64_t next = row_of(walk.begin + ahead * walk.step);  // whose state is copied next
  begin(ahead);
  int turn = 0;
  unsigned char* place = own;
#pragma unroll 1
  for (uint32_t token = walk.begin; token < walk.end; token += walk.step, turn ^= 1) {
    const int64_t row = p.rows[token];
    wait_for_all_but<ahead - 1>();
    StatePieces<S> pieces;
    pieces.take(place);
    float4 s[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) s[i / 2][i % 2] = pieces.get(i / 2, i % 2);
    if (ok(next)) StatePieces<S>::begin_copy(place, states + next * p.stride);
    end_group();
    next = row_of(token + (ahead + 1) * walk.step);
    place = place == own + (ahead - 1) * kStateBytes<S> ? own : place + kStateBytes<S>;
    team_barrier<TEAMS>(team);
    const float4* in = reinterpret_cast<const float4*>(shared.in[turn]) + eighth;
    float removed[2] = {0.0f, 0.0f}, y[2] = {0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const float4 a = in[kA * 16 + part * 8];
#pragma unroll
      for (int i = 0; i < 2; i++) removed[i] += dot4(s[i][part], a);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) removed[i] = reduce_lanes<8>(removed[i], Add{});
    const float v[2] = {shared.in[turn][kV][value], shared.in[turn][kV][value + 32]};
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const float4 decay = in[kW * 16 + part * 8], b = in[kB * 16 + part * 8], k = in[kK * 16 + part * 8];
      const float4 r = in[kR * 16 + part * 8];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        s[i][part] = step4(s[i][part], decay, removed[i], b, v[i], k);
        y[i] += dot4(s[i][part], r);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) y[i] = reduce_lanes<8>(y[i], Add{});
    if (!ok(row)) y[0] = y[1] = row == -1 ? 0.0f : nanf("");  // -1: norm_shift.cuh
    if (eighth == 0) shared.y[turn][value] = y[0], shared.y[turn][value + 32] = y[1];
    if (!ok(row)) continue;
    StatePieces<S> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.set(i / 2, i % 2, s[i / 2][i % 2]);
    result.store(states + row * p.stride);
  }
  team_barrier<TEAMS>(team);
}

// Where the second halves of the low-rank projections are: in the block's own memory, or, `made` null, where p says.
template <class W>
struct Ranks {
  const W* made = nullptr;       // [jobs, each, 64]
  uint32_t each = 0, first = 0;  // the tokens there, and the first of them

  __device__ __forceinline__ uint32_t bits(int job, uint32_t token) const {
    return *reinterpret_cast<const uint32_t*>(made + (job * each + token - first) * kHead + threadIdx.x % 32 * 2);
  }
};

// The ninth warp has two neighbouring channels a lane, of a token's inputs and of the weights. The inputs are bits as
// they come, so that nothing waits for them before they are used.
template <class W>
struct HeadInputs {
  uint32_t r, w, k, v, a, g, v_mix, v_first;

  template <class S>
  __device__ __forceinline__ void load(const HeadStep<W, S>& p, uint32_t at, const Ranks<W>& ranks, uint32_t token) {
    const auto bits = [&](const W* from) { return __ldcg(reinterpret_cast<const uint32_t*>(from + at)); };
    const auto rank_bits = [&](const W* from, int job) { return ranks.made ? ranks.bits(job, token) : bits(from); };
    r = bits(p.r), k = bits(p.k), v = bits(p.v);
    w = rank_bits(p.w, kDecayRank), a = rank_bits(p.a, kRateRank), g = rank_bits(p.g, kGateRank);
    if (p.v_mix != nullptr) v_mix = rank_bits(p.v_mix, kMixRank), v_first = bits(p.v_first);
  }
};

template <class W>
__device__ __forceinline__ float2 pair_of(const uint32_t& bits) {
  return load_pair(reinterpret_cast<const W*>(&bits));
}

struct HeadWeights {
  float2 w0, a0, v0, k_k, k_a, r_k, weight, bias;

  template <class W, class S>
  __device__ __forceinline__ void load(const HeadStep<W, S>& p, uint32_t c) {
    w0 = load_pair(p.w0 + c), a0 = load_pair(p.a0 + c), k_k = load_pair(p.k_k + c), k_a = load_pair(p.k_a + c);
    r_k = load_pair(p.r_k + c), weight = load_pair(p.weight + c), bias = load_pair(p.bias + c);
    v0 = p.v_mix == nullptr ? make_float2(0.0f, 0.0f) : load_pair(p.v0 + c);
  }
};

// What the end needs of a token.
struct HeadEnd {
  float2 bonus;   // times the value
  uint32_t gate;  // as in HeadInputs
};

// To two units in the last place, and without the branches of an exact quotient, which would follow one another.
__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// From the projections of a token's head to the inputs of the recurrence.
template <class W, class S>
__device__ __forceinline__ HeadEnd prepare_head(const HeadStep<W, S>& p, const HeadWeights& weights,
                                                const HeadInputs<W>& inputs, float (&in)[6][kHead], uint32_t at) {
  const int c = threadIdx.x % 32 * 2, place = StatePieces<S>::place(c);
  const float2 r = pair_of<W>(inputs.r), w = pair_of<W>(inputs.w), k = pair_of<W>(inputs.k), a = pair_of<W>(inputs.a);
  float2 v = pair_of<W>(inputs.v);
  const float2 kk = make_float2(k.x * weights.k_k.x, k.y * weights.k_k.y);
  const float squares = reduce_lanes(kk.x * kk.x + kk.y * kk.y, Add{});
  if (p.v_mix == nullptr) {
    store_pair(p.v_first + at, v.x, v.y);
  } else {
    const float2 mix = pair_of<W>(inputs.v_mix), first = pair_of<W>(inputs.v_first);
    v.x += (first.x - v.x) * fast_sigmoid(mix.x + weights.v0.x),
        v.y += (first.y - v.y) * fast_sigmoid(mix.y + weights.v0.y);
  }
  const float2 rate = make_float2(fast_sigmoid(a.x + weights.a0.x), fast_sigmoid(a.y + weights.a0.y));
  const float2 key =
      make_float2(k.x * (1.0f + (rate.x - 1.0f) * weights.k_a.x), k.y * (1.0f + (rate.y - 1.0f) * weights.k_a.y));
  const float bonus = reduce_lanes(r.x * key.x * weights.r_k.x + r.y * key.y * weights.r_k.y, Add{});
  constexpr float rate_of_decay = -0.60653065971263342f;  // -e^-0.5
  const float scale = rsqrtf(fmaxf(squares, 1e-24f));
  store_pair(&in[kR][place], r.x, r.y);
  store_pair(&in[kW][place], expf(rate_of_decay * fast_sigmoid(w.x + weights.w0.x)),
             expf(rate_of_decay * fast_sigmoid(w.y + weights.w0.y)));
  store_pair(&in[kK][place], key.x, key.y);
  store_pair(&in[kV][c], v.x, v.y);
  store_pair(&in[kA][place], -(kk.x * scale), -(kk.y * scale));
  store_pair(&in[kB][place], kk.x * scale * rate.x, kk.y * scale * rate.y);
  return {make_float2(bonus * v.x, bonus * v.y), inputs.g};
}

// From the recurrence's output to what the output projection reads.
template <class W>
__device__ __forceinline__ void finish_head(const HeadWeights& weights, const HeadEnd& end, const float (&y)[kHead],
                                            float eps, W* out) {
  float2 normal = load_pair(&y[threadIdx.x % 32 * 2]);
  const float mean = reduce_lanes(normal.x + normal.y, Add{}) * (1.0f / kHead);
  normal.x -= mean, normal.y -= mean;
  const float variance = reduce_lanes(normal.x * normal.x + normal.y * normal.y, Add{}) * (1.0f / kHead);
  const float scale = rsqrtf(variance + eps);
  const float2 gate = pair_of<W>(end.gate);
  store_pair(out, (normal.x * scale * weights.weight.x + weights.bias.x + end.bonus.x) * gate.x,
             (normal.y * scale * weights.weight.y + weights.bias.y + end.bonus.y) * gate.y);
}

// The ninth warp, a token ahead of the others and one behind, and with the inputs of the next two on their way.
// `begin` waits for the kernel before, and says where to find what is Ranks.
template <int TEAMS, class W, class S, class Begin>
__device__ __forceinline__ void serve_states(const HeadStep<W, S>& p, HeadShared& shared, int team,
                                             const TokenWalk& walk, Begin begin) {
  const uint32_t c = blockIdx.x * kHead + threadIdx.x % 32 * 2, channels = static_cast<uint32_t>(p.heads) * kHead;
  HeadWeights weights;
  weights.load(p, c);
  const Ranks<W> ranks = begin(0);
  HeadInputs<W> inputs[2];
  const auto load = [&](HeadInputs<W>& one, uint32_t token) {
    if (token < walk.end) one.load(p, token * channels + c, ranks, token);
  };
  load(inputs[0], walk.begin), load(inputs[1], walk.begin + walk.step);
  uint32_t token = walk.begin;
  HeadEnd end{};
  // The next token; false where there was none.
  const auto serve = [&](HeadInputs<W>& mine, int turn) __attribute__((always_inline)) {
    const bool more = token < walk.end;
    const HeadEnd before = end;
    if (more) end = prepare_head(p, weights, mine, shared.in[turn], token * channels + c);
    load(mine, token + 2 * walk.step);
    team_barrier<TEAMS>(team);
    if (token != walk.begin) {
      finish_head(weights, before, shared.y[turn ^ 1], p.eps, p.out + ((token - walk.step) * channels + c));
    }
    token += walk.step;
    return more;
  };
  while (serve(inputs[0], 0) && serve(inputs[1], 1)) {
  }
}

// Grid: the heads, by the blocks of each, which share the tokens: `each` a block, in turns for its teams. Both sides of
// a team pass a barrier a token, and one more. `memory`: the rings of the teams, of `ring_bytes` each.
// `begin(copies)`, called once by every thread, waits for the kernel before; `copies`: that the thread has begun.
template <int TEAMS, class W, class S, class Begin>
__device__ __forceinline__ void step_head(const HeadStep<W, S>& p, uint32_t n, uint32_t each, unsigned char* memory,
                                          uint32_t ring_bytes, Begin begin) {
  __shared__ __align__(16) HeadShared shared[TEAMS];
  const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // so the compiler sees that a warp stays together
  const int team = TEAMS == 1 ? 0 : warp / (kHeadThreads / 32);
  const uint32_t first = blockIdx.y * each;
  const TokenWalk walk{first, first + team, min(first + each, n), TEAMS};
  if (warp - team * (kHeadThreads / 32) < kStepThreads / 32) {
    step_states<TEAMS>(p, shared[team], memory + team * ring_bytes, team, walk, begin);
  } else {
    serve_states<TEAMS>(p, shared[team], team, walk, begin);
  }
}

template <class W, class S>
__global__ void __launch_bounds__(kHeadThreads, kHeadBlocks<S>)
    head_step_kernel(const HeadStep<W, S> p, uint32_t n, uint32_t each) {
  extern __shared__ __align__(16) unsigned char memory[];
  step_head<1>(p, n, each, memory, 0, [](uint32_t) {
    wait_for_previous();
    let_next_begin();
    return Ranks<W>{};
  });
}

// With the second halves of the low-rank projections, of `each` tokens, before the rings in shared memory.
template <int TEAMS, class W, class S>
__global__ void __launch_bounds__(TEAMS* kHeadThreads, 2)
    head_step_ranks_kernel(const HeadStep<W, S> p, const __grid_constant__ RankList<W> list, uint32_t n, uint32_t each,
                           uint32_t rank_bytes, uint32_t ring_bytes) {
  extern __shared__ __align__(16) unsigned char bytes[];
  W* const memory = reinterpret_cast<W*>(bytes);
  start_rank_weights(list, memory, each);
  const uint32_t first = blockIdx.y * each, mine = min(each, n - first);
  step_head<TEAMS>(
      p, n, each, bytes + rank_bytes, ring_bytes, [&](uint32_t copies) __attribute__((always_inline)) -> Ranks<W> {
        wait_for_previous();
        let_next_begin();
        return {finish_ranks<TEAMS, kHeadThreads / 32, kStatesAhead<S>>(list, memory, first, mine, each, copies), each,
                first};
      });
}

}  // namespace cog_rwkv

// Rows of the residual stream as blocks read them: with what is to be added, and with their mean and deviation. W is
// the dtype of the activations, float16 or bfloat16; the residual stream is float32.
//
// A thread has V fours of channels. With V = 1, on Hopper, a block can have the rows of its next tokens on their way
// into shared memory, and the blocks of a cluster can share a row.
#pragma once

#include "../csrc/bulk.cuh"
#include "../csrc/chain.cuh"
#include "../csrc/cluster.cuh"
#include "../csrc/packed_store.cuh"
#include "../csrc/reduce.cuh"

namespace cog_rwkv {

constexpr uint32_t kGroup = 128;      // neighbouring channels, which a warp has at a time
constexpr uint32_t kMostGroups = 64;  // of a row

// What a product left for the residual stream: `slices` partial sums of [n, c], added in order and multiplied by
// `scale`. Float32, or W where `rounded`, which has one slice. No slices: there is nothing to add.
struct Delta {
  const void* values = nullptr;
  int slices = 0;
  bool rounded = false;
  float scale = 1.0f;
};

// Rows that have a layer norm.
struct NormRows {
  uint32_t n, c;
  uint32_t parts;        // blocks of a cluster, which share a row: a power of two
  float eps, inverse_c;  // 1 / c
};

struct ResidualRows : NormRows {
  const float* x;  // [n, c]
  Delta delta;
  int64_t size;  // n * c

  // Where channel `channel` of token t is, in 32 bits, which take fewer instructions.
  __device__ __forceinline__ uint32_t at(uint32_t t, uint32_t channel) const { return t * c + channel; }
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator*(float4 a, float f) {
  return make_float4(a.x * f, a.y * f, a.z * f, a.w * f);
}

// f of four pairs.
template <class F>
__device__ __forceinline__ float4 each4(float4 a, float4 b, F f) {
  return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}

__device__ __forceinline__ float4 all4(float f) { return make_float4(f, f, f, f); }

__device__ __forceinline__ float4 float4_of(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Past the multiprocessor's own cache, which may hold what was there before: for what other kernels write and this one
// reads before its wait. Only what is `there`, else 0, but without a branch.
__device__ __forceinline__ float4 float4_beyond(const float* p, bool there = true) {
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if defined(__CUDA_ARCH__)
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
               : "l"(p), "r"(static_cast<uint32_t>(there))
               : "memory");
#else
  if (there) v = float4_of(p);
#endif
  return v;
}

template <class W>
__device__ __forceinline__ float4 float4_of(const W* p) {
  const Vector<W, 4> v = load_vector<W, 4>(p);
  return make_float4(v.values[0], v.values[1], v.values[2], v.values[3]);
}

__device__ __forceinline__ void store(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }

template <class W>
__device__ __forceinline__ void store_rounded(W* to, float4 v) {
  store_packed<W, 4>(to, {{static_cast<W>(v.x), static_cast<W>(v.y), static_cast<W>(v.z), static_cast<W>(v.w)}});
}

// The channels of a thread: V fours, each in a group of its warp's. Groups are cut alike however many blocks share a
// row, and so is the order in which a row's values are added.
template <int V>
struct Channels {
  uint32_t c, first;

  __device__ explicit Channels(const NormRows& p)
      : c(p.c), first((blockIdx.x & (p.parts - 1)) * V * (blockDim.x / 32) + threadIdx.x / 32) {}

  __device__ __forceinline__ uint32_t group(int j) const { return first + j * (blockDim.x / 32); }
  __device__ __forceinline__ uint32_t channel(int j) const { return group(j) * kGroup + 4 * (threadIdx.x % 32); }
  __device__ __forceinline__ bool exists(int j) const { return channel(j) < c; }
  __device__ __forceinline__ uint32_t groups() const { return (c + kGroup - 1) / kGroup; }
  // How many channels a group has: all, or the half that is left of a row.
  __device__ __forceinline__ float size_of(uint32_t group) const {
    return group >= groups() ? 0.0f : (group + 1) * kGroup <= c ? kGroup : kGroup / 2;
  }
};

// In registers from here on, by way of the other lanes: an argument that is read later may have to come from far.
__device__ __forceinline__ uint32_t at_hand(uint32_t value) { return __shfl_sync(kAllLanes, value, 0); }

template <class T>
__device__ __forceinline__ const T* at_hand(const T* pointer) {
  const auto bits = reinterpret_cast<uint64_t>(pointer);
  const uint64_t high = at_hand(static_cast<uint32_t>(bits >> 32)), low = at_hand(static_cast<uint32_t>(bits));
  return reinterpret_cast<const T*>(high << 32 | low);
}

// What is to be added to the residual stream, for who reads it from global memory. Slices are less than 2^32 bytes.
template <class W>
struct DeltaReader {
  const unsigned char* values;
  uint32_t slices, step;  // from slice to slice, in bytes
  float scale;
  bool rounded;

  __device__ __forceinline__ explicit DeltaReader(const ResidualRows& p)
      : values(at_hand(static_cast<const unsigned char*>(p.delta.values))),
        slices(static_cast<uint32_t>(p.delta.slices)),
        step(at_hand(static_cast<uint32_t>(p.size * sizeof(float)))),
        scale(p.delta.scale),
        rounded(p.delta.rounded) {}

  // x with what is added to it, at element `at` of [n, c]; `ahead` slices and the first are on their way at once.
  template <int ahead>
  __device__ __forceinline__ float4 add_to(float4 x, uint32_t at) const {
    if (rounded) return x + float4_of(reinterpret_cast<const W*>(values) + at) * scale;
    const unsigned char* from = values + uint64_t{at} * sizeof(float);
    const auto slice = [&](uint32_t s) {
      return float4_beyond(reinterpret_cast<const float*>(from + uint64_t{s} * step), s < slices);
    };
    float4 sum = slice(0);
    uint32_t s = 1;
#pragma unroll 1
    do {
      float4 next[ahead];
#pragma unroll
      for (uint32_t i = 0; i < ahead; i++) next[i] = slice(s + i);
#pragma unroll
      for (uint32_t i = 0; i < ahead; i++) sum = sum + next[i];
      s += ahead;
    } while (s < slices);
    return x + sum * scale;
  }
};

constexpr uint32_t kMostStages = 4;

// The rows of a block's next tokens, on their way into its shared memory in up to kMostStages turns: of each token x,
// what is to be added to it and, where `states` says so, a state. One thread begins the copies.
template <class W>
struct RowRing {
  const ResidualRows& p;
  unsigned char* memory;
  uint64_t* arrived;          // a barrier for each turn
  uint32_t row, part, stage;  // bytes of a row of x, of one of a slice, of all rows of a token

  __device__ __forceinline__ RowRing(const ResidualRows& rows, unsigned char* at, uint64_t* barriers, bool states)
      : p(rows),
        memory(at),
        arrived(barriers),
        row(rows.c * sizeof(float)),
        part(rows.c * (rows.delta.rounded ? sizeof(W) : sizeof(float))),
        stage(bytes_of(rows, states)) {}

  __host__ __device__ static uint32_t bytes_of(const ResidualRows& p, bool states) {
    const uint32_t width = p.delta.rounded ? sizeof(W) : sizeof(float);
    return p.c * (sizeof(float) * (states ? 2 : 1) + p.delta.slices * width);
  }

  __device__ __forceinline__ void make(uint32_t stages) const {
#pragma unroll 1
    for (uint32_t turn = 0; turn < stages; turn++) make_inbox(&arrived[turn]);
  }

  // Begins with what is left of token t: all but the rest. `state` null: it has none. `with_x`: x is not of the rest.
  __device__ __forceinline__ void begin(uint32_t t, uint32_t turn, const float* state, bool with_x) const {
    uint64_t* barrier = &arrived[turn];
    expect_bytes(barrier, row + p.delta.slices * part + (state != nullptr ? row : 0));
    if (with_x) begin_x(t, turn);
    if (state != nullptr) copy_in(place(turn) + stage - row, state, row, barrier);
  }
  __device__ __forceinline__ void begin_rest(uint32_t t, uint32_t turn, bool with_x) const {
    if (with_x) begin_x(t, turn);
    const unsigned char* from = static_cast<const unsigned char*>(p.delta.values) + size_t{t} * part;
    unsigned char* to = place(turn) + row;
#pragma unroll 1
    for (int s = 0; s < p.delta.slices; s++, to += part, from += p.size * sizeof(float)) {
      copy_in(to, from, part, &arrived[turn]);
    }
  }

  // Until the rows are there; `round`: how often this turn has been there before.
  __device__ __forceinline__ void wait(uint32_t turn, uint32_t round) const {
    wait_for_bytes(&arrived[turn], round & 1);
  }
  // Four channels of the sum.
  __device__ __forceinline__ float4 take(uint32_t turn, uint32_t channel) const {
    const unsigned char* at = place(turn) + channel * sizeof(float);
    const float4 x = *reinterpret_cast<const float4*>(at);
    if (p.delta.slices == 0) return x;
    if (p.delta.rounded) {
      return x + float4_of(reinterpret_cast<const W*>(place(turn) + row) + channel) * p.delta.scale;
    }
    float4 sum = *reinterpret_cast<const float4*>(at += row);
#pragma unroll 2
    for (int s = 1; s < p.delta.slices; s++) sum = sum + *reinterpret_cast<const float4*>(at += row);
    return x + sum * p.delta.scale;
  }
  __device__ __forceinline__ float4 take_state(uint32_t turn, uint32_t channel) const {
    return *reinterpret_cast<const float4*>(place(turn) + stage - row + channel * sizeof(float));
  }

 private:
  __device__ __forceinline__ unsigned char* place(uint32_t turn) const { return memory + turn * stage; }
  __device__ __forceinline__ void begin_x(uint32_t t, uint32_t turn) const {
    copy_in(place(turn), p.x + size_t{t} * p.c, row, &arrived[turn]);
  }
};

// Of each group of a row, its mean and the sum of the squares around that; tokens in turns of two. A block gets those
// of the next token but one only when all warps have begun with the next one, and so are done with these: each sends,
// also one that has no channels.
struct GroupSums {
  float2 of[2][kMostGroups];
  uint64_t inbox[2];
};

// A normalised value is x * scale + shift.
struct RowScale {
  float scale, shift;

  __device__ __forceinline__ float4 operator()(float4 x) const {
    return each4(x, x, [&](float value, float) { return fmaf(value, scale, shift); });
  }
};

// In a kernel whose blocks may share rows all threads call these at its beginning, the second one some time after the
// first, and before the wait: the greeting's end clears the cache of the multiprocessor.
__device__ __forceinline__ void begin_sums(const NormRows& p, GroupSums& shared) {
  if (p.parts == 1) return;
  if (threadIdx.x == 0) make_inbox(&shared.inbox[0]), make_inbox(&shared.inbox[1]);
  begin_greeting();
}
__device__ __forceinline__ void greet_cluster(const NormRows& p) {
  if (p.parts > 1) end_greeting();
}

// Both sums over a warp, side by side.
__device__ __forceinline__ float2 reduce_pair(float a, float b) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, a, step), another = __shfl_xor_sync(kAllLanes, b, step);
    a += other, b += another;
  }
  return make_float2(a, b);
}

// Mean and squares of a group, in one pass around one of its values: with 128 values that costs at most a factor of
// 128 in the rounding of the squares, where that value lies as far out as it can.
template <int V>
__device__ __forceinline__ float2 sums_of_group(const Channels<V>& channels, int j, float4 x) {
  const float pivot = __shfl_sync(kAllLanes, x.x, 0);
  const bool exists = channels.exists(j);
  const float4 d = exists ? make_float4(x.x - pivot, x.y - pivot, x.z - pivot, x.w - pivot) : all4(0.0f);
  const float2 sums = reduce_pair((d.x + d.y) + (d.z + d.w), (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w));
  const float off = sums.x * (channels.size_of(channels.group(j)) == kGroup ? 1.0f / kGroup : 2.0f / kGroup);
  return make_float2(pivot + off, fmaxf(sums.y - sums.x * off, 0.0f));
}

// The same of a row, around the mean of its first group.
template <int V>
__device__ __forceinline__ RowScale scale_of_groups(const NormRows& p, const Channels<V>& channels, const float2* of) {
  const uint32_t lane = threadIdx.x % 32;
  const float pivot = of[0].x;
  float first = 0.0f, second = 0.0f;
  const auto add = [&](uint32_t group) {
    const float size = channels.size_of(group);
    if (size == 0.0f) return;
    const float2 sums = of[group];
    const float off = sums.x - pivot, moment = size * off;
    first += moment, second += sums.y + moment * off;
  };
  add(lane);
  if (channels.groups() > 32) add(lane + 32);
  const float2 sums = reduce_pair(first, second);
  const float off = sums.x * p.inverse_c, variance = fmaxf(sums.y * p.inverse_c - off * off, 0.0f);
  const float scale = rsqrtf(variance + p.eps);
  return {scale, -(pivot + off) * scale};
}

// All threads of a block call it for each token; `round` counts these, from 0. `joint`: the blocks of a cluster may
// share a row, and then all of their threads do.
template <bool joint, int V>
__device__ __forceinline__ RowScale scale_of_row(const NormRows& p, const Channels<V>& channels, const float4 (&x)[V],
                                                 GroupSums& shared, uint32_t round) {
  const uint32_t lane = threadIdx.x % 32, turn = round % 2;
  uint64_t* inbox = &shared.inbox[turn];
  const bool sends = joint && p.parts > 1;
  if (sends && threadIdx.x == 0) expect_bytes(inbox, p.parts * (blockDim.x / 32) * sizeof(float2));
#pragma unroll
  for (int j = 0; j < V; j++) {
    const float2 sums = sums_of_group(channels, j, x[j]);
    float2* to = &shared.of[turn][channels.group(j)];
    if (!sends) {
      if (lane == 0) *to = sums;
    } else if (lane < p.parts) {
      send_to_block(lane, to, sums, inbox);
    }
  }
  if (sends) {
    wait_for_bytes(inbox, round / 2 % 2);
  } else {
    __syncthreads();
  }
  return scale_of_groups(p, channels, shared.of[turn]);
}

}  // namespace cog_rwkv

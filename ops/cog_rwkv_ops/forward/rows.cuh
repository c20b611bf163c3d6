// Rows of the residual stream as blocks read them: with what is to be added, and with their mean and deviation. W is
// the dtype of the activations, float16 or bfloat16; the residual stream is float32.
//
// On Hopper a thread has four channels (V = 1), and a block the rows of its next tokens on their way into shared
// memory; where tokens are few, the blocks of a cluster share a row. Elsewhere a thread has eight channels (V = 2).
#pragma once

#include "../csrc/ahead.cuh"
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

struct ResidualRows {
  const float* x;  // [n, c]
  Delta delta;
  int64_t size;  // n * c
  uint32_t n, c;
  uint32_t parts;        // blocks of a cluster, which share a row
  float eps, inverse_c;  // 1 / c

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

__device__ __forceinline__ float4 float4_of(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <class W>
__device__ __forceinline__ float4 float4_of(const W* p) {
  const Vector<W, 4> v = load_vector<W, 4>(p);
  return make_float4(v.values[0], v.values[1], v.values[2], v.values[3]);
}

template <class W>
__device__ __forceinline__ void store_rounded(W* p, float4 v) {
  store_packed<W, 4>(p, {{static_cast<W>(v.x), static_cast<W>(v.y), static_cast<W>(v.z), static_cast<W>(v.w)}});
}

// The channels of a thread: V fours, each in a group of its warp's. Groups are cut alike however many blocks share a
// row, and so is the order in which a row's values are added.
template <int V>
struct Channels {
  uint32_t c, first;

  __device__ explicit Channels(const ResidualRows& p)
      : c(p.c), first(rank_in_cluster(p.parts) * V * (blockDim.x / 32) + threadIdx.x / 32) {}

  __device__ __forceinline__ uint32_t group(int j) const { return first + j * (blockDim.x / 32); }
  __device__ __forceinline__ uint32_t channel(int j) const { return group(j) * kGroup + 4 * (threadIdx.x % 32); }
  __device__ __forceinline__ bool exists(int j) const { return channel(j) < c; }
  __device__ __forceinline__ uint32_t groups() const { return (c + kGroup - 1) / kGroup; }
  // How many channels a group has: all, or the half that is left of a row.
  __device__ __forceinline__ float size_of(uint32_t group) const {
    return group >= groups() ? 0.0f : (group + 1) * kGroup <= c ? kGroup : kGroup / 2;
  }
};

// A thread's values of some tokens' rows. With V = 1 those of up to kMostStages tokens, in turns, can be on their way;
// a thread copies what it reads itself, so that no barrier is needed.
template <class W, int V>
struct RowReader {
  const ResidualRows& p;
  const Channels<V>& channels;
  unsigned char* own;     // the first of this thread's places: 16 bytes of x and each slice, for each token
  uint32_t piece, stage;  // bytes from one place to that of the next slice, and of the next token

  __device__ __forceinline__ RowReader(const ResidualRows& rows, const Channels<V>& its, unsigned char* memory)
      : p(rows),
        channels(its),
        own(memory + threadIdx.x * 16),
        piece(blockDim.x * 16),
        stage(piece * (1 + rows.delta.slices)) {}

  // Begins to copy x of token t.
  __device__ __forceinline__ void begin_x(uint32_t t, uint32_t turn) const {
    if constexpr (V == 1) {
      if (channels.exists(0)) copy_ahead<16>(own + turn * stage, p.x + p.at(t, channels.channel(0)));
    }
  }

  // Begins to copy what is to be added.
  __device__ __forceinline__ void begin_delta(uint32_t t, uint32_t turn) const {
    if constexpr (V == 1) {
      if (!channels.exists(0)) return;
      const uint32_t at = p.at(t, channels.channel(0));
      if (p.delta.rounded) return copy_ahead<8>(own + turn * stage + piece, static_cast<const W*>(p.delta.values) + at);
      const float* slice = static_cast<const float*>(p.delta.values) + at;
      unsigned char* place = own + turn * stage;
#pragma unroll 2
      for (int s = 0; s < p.delta.slices; s++, slice += p.size) copy_ahead<16>(place += piece, slice);
    }
  }

  // Takes the row of token t, which has arrived.
  __device__ __forceinline__ void take(uint32_t t, uint32_t turn, float4 (&x)[V]) const {
#pragma unroll
    for (int j = 0; j < V; j++) {
      x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!channels.exists(j)) continue;
      if constexpr (V == 1) {
        x[j] = residual(own + turn * stage, own + turn * stage + piece, piece);
      } else {
        const size_t at = p.at(t, channels.channel(j)), width = p.delta.rounded ? sizeof(W) : sizeof(float);
        x[j] = residual(p.x + at, static_cast<const unsigned char*>(p.delta.values) + at * width, p.size * width);
      }
    }
  }

 private:
  // Slices are `distance` bytes apart.
  __device__ __forceinline__ float4 residual(const void* from, const void* delta, size_t distance) const {
    const float4 x = *static_cast<const float4*>(from);
    if (p.delta.slices == 0) return x;
    if (p.delta.rounded) return x + float4_of(static_cast<const W*>(delta)) * p.delta.scale;
    const auto* slice = static_cast<const unsigned char*>(delta);
    float4 sum = *reinterpret_cast<const float4*>(slice);
#pragma unroll 4
    for (int s = 1; s < p.delta.slices; s++) sum = sum + *reinterpret_cast<const float4*>(slice + s * distance);
    return x + sum * p.delta.scale;
  }
};

// Of each group of a row, its mean and the sum of the squares around that; tokens in turns of two. A block gets those
// of the next token but one only when all warps have begun with the next one, and so are done with these: each sends,
// also one that has no channels.
struct GroupSums {
  float2 of[2][kMostGroups];
  uint64_t inbox[2];
};

// A row's mean, and the inverse of its deviation.
struct RowScale {
  float mean, scale;
};

template <int V>
__device__ __forceinline__ bool in_parts(const ResidualRows& p) {
  return V == 1 && p.parts > 1;
}

// At the beginning of a kernel, by all threads.
template <int V>
__device__ __forceinline__ void begin_sums(const ResidualRows& p, GroupSums& shared) {
  if (!in_parts<V>(p)) return;
  if (threadIdx.x == 0) make_inbox(&shared.inbox[0]), make_inbox(&shared.inbox[1]);
  begin_greeting();
}

// All threads of a cluster call it for each token; `round` counts these, from 0.
template <int V>
__device__ __forceinline__ RowScale scale_of_row(const ResidualRows& p, const Channels<V>& channels,
                                                 const float4 (&x)[V], GroupSums& shared, uint32_t round) {
  const uint32_t lane = threadIdx.x % 32, turn = round % 2;
  uint64_t* inbox = &shared.inbox[turn];
  if (in_parts<V>(p)) {
    if (round == 0) end_greeting();
    if (threadIdx.x == 0) expect_bytes(inbox, p.parts * (blockDim.x / 32) * sizeof(float2));
  }
#pragma unroll
  for (int j = 0; j < V; j++) {
    const uint32_t group = channels.group(j);
    const float size = channels.size_of(group);
    const float mean =
        reduce_lanes((x[j].x + x[j].y) + (x[j].z + x[j].w), Add{}) * (size == kGroup ? 1.0f / kGroup : 2.0f / kGroup);
    const float4 d = make_float4(x[j].x - mean, x[j].y - mean, x[j].z - mean, x[j].w - mean);
    const float squares = channels.exists(j) ? (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w) : 0.0f;
    const float2 sums = make_float2(mean, reduce_lanes(squares, Add{}));
    if (in_parts<V>(p)) {
      if (lane < p.parts) send_to_block(lane, &shared.of[turn][group], sums, inbox);
    } else if (lane == 0) {
      shared.of[turn][group] = sums;
    }
  }
  if (in_parts<V>(p)) {
    wait_for_bytes(inbox, round / 2 % 2);
  } else {
    __syncthreads();
  }
  const float low_size = channels.size_of(lane), high_size = channels.size_of(lane + 32);
  const float2 none = make_float2(0.0f, 0.0f);
  const float2 low = low_size > 0 ? shared.of[turn][lane] : none,
               high = high_size > 0 ? shared.of[turn][lane + 32] : none;
  const float mean = reduce_lanes(low.x * low_size + high.x * high_size, Add{}) * p.inverse_c;
  const float2 off = make_float2(low.x - mean, high.x - mean);
  const float squares = low.y + high.y + (low_size * off.x * off.x + high_size * off.y * off.y);
  return {mean, rsqrtf(reduce_lanes(squares, Add{}) * p.inverse_c + p.eps)};
}

}  // namespace cog_rwkv

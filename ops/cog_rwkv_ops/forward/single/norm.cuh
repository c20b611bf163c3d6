// The layer norm of the token's row, its shift and its mixes, by each block for itself: what the block's rows are
// multiplied by.
#pragma once

#include "../rows.cuh"
#include "grid.cuh"
#include "ring.cuh"

namespace cog_rwkv {

constexpr float kFixedScale = 4294967296.0f;  // of Single::sums
constexpr float kFixedMost = 8388608.0f;      // of a block: as much of 256 blocks has room

__device__ __forceinline__ float4 fresh4(const float* from) { return __ldcg(reinterpret_cast<const float4*>(from)); }

// Of Single::sums, between blocks: fewer add to the same place, and more of the cache's slices are busy with it.
template <int V>
constexpr int kSumCopies = 16 / V;
static_assert(kSumCopies<4> <= kMostSums);

// What a block's warps read of a stage: made before its barrier, as it takes a while.
struct StageParts {
  StagePart list[kFirstJobs];
  uint32_t count;
};

// By all readers, while nobody reads `parts`. Returns the mixes of the parts, four bits each, and in the highest how
// many parts there are: at most seven.
__device__ __forceinline__ uint32_t list_parts(const Single& p, const Place& at, StageParts& parts) {
  uint32_t mixes = 0, count = 0;
  each_part(p, at.stage, at.layer, blockIdx.x, gridDim.x, [&](const StagePart& part) {
    mixes |= (at.stage == kFirstStage ? mix_of_job(part.job) : 0) << 4 * count;
    if (threadIdx.x == 0) parts.list[count] = part;
    count++;
  });
  if (threadIdx.x == 0) parts.count = count;
  return mixes | count << 28;
}

// A thread has the channels 4 t to 4 t + 3 of each group of 1024.
template <class W, int V>
class RowNorm {
  static constexpr int kGroups = V / 4;
  using Fours = float4[kGroups];

 public:
  __device__ __forceinline__ RowNorm(const Single& p, const TokenRow& token) : p_(p), token_(token) {}

  // Writes the vectors of a stage, [parts][C], to shared memory. `moments` has room for one of each warp.
  __device__ __forceinline__ void run(const Place& at, GridBarrier& barrier, StageParts& parts, float4* moments,
                                      W* vectors) {
    const bool time = at.stage == kFirstStage, head = at.stage == kHeadStage, begins = time && at.layer == 0;
    const SingleLayer& layer = p_.layers[head ? 0 : at.layer];
    const float* weight = head ? p_.norm_weight : layer.norm_weight[time ? 0 : 1];
    const float* bias = head ? p_.norm_bias : layer.norm_bias[time ? 0 : 1];
    float* const shift = p_.shift + ((2 * int64_t{at.layer} + (time ? 0 : 1)) * p_.pool_rows + token_.row) * p_.c;
    const bool shifts = token_.ok && !head;
    const uint32_t mixes = list_parts(p_, at, parts);
    Fours x = {}, scale = {}, offset = {}, before = {}, mix[2] = {};  // so that nothing lives from stage to stage
    const float* row = begins ? p_.x : p_.middle;
    each([&](int g, uint32_t c) {
      scale[g] = fresh4(weight + c), offset[g] = fresh4(bias + c);
      if (shifts) before[g] = fresh4(shift + c);
      if (!head) mix[0][g] = mix_at(layer, time, mixes, 0, c);
      if (time) mix[1][g] = mix_at(layer, time, mixes, 1, c);
      if (at.stage != kKeyStage) x[g] = fresh4(row + c);
    });
    if (!begins) barrier.wait();
    write_shift();
    if (at.stage == kKeyStage) {
      each([&](int g, uint32_t c) { x[g] = fresh4(row + c); });
    } else if (!begins) {
      add_values(x);
    }
    const RowScale row_scale = scale_of(x, moments);
    each([&](int g, uint32_t c) {
      float4 y = each4(row_scale(x[g]), scale[g], [](float v, float f) { return v * f; }) + offset[g];
      if (!shifts) {
        const float none = token_.nothing();
        before[g] = make_float4(none, none, none, none);
        if (!token_.ok && token_.row == -1) y = before[g];
      }
      if (head) return put(vectors + c, y);
      const float4 back = each4(before[g], y, [](float b, float n) { return b - n; });
      for (uint32_t i = 0; i < mixes >> 28; i++) {
        const float4 f = i == 0 ? mix[0][g] : i == 1 ? mix[1][g] : mix_at(layer, time, mixes, i, c);
        put(vectors + i * p_.c + c, y + each4(back, f, [](float d, float m) { return d * m; }));
      }
      if (!in_slice(c)) return;
      if (time) *reinterpret_cast<float4*>(p_.stream + c) = x[g];
      if (shifts) kept_ = y, kept_to_ = shift + c;
    });
    sync_readers();
  }

  // After the barrier that follows: the shift state, which others may have read until then.
  __device__ __forceinline__ void write_shift() {
    if (kept_to_ != nullptr) *reinterpret_cast<float4*>(kept_to_) = kept_;
    kept_to_ = nullptr;
  }

  // After that of the first stage: sums of values begin anew.
  __device__ __forceinline__ void clear_sums() const {
    each([&](int, uint32_t c) {
      if (!in_slice(c)) return;
#pragma unroll
      for (int i = 0; i < 2 * kSumCopies<V>; i++) {
        reinterpret_cast<longlong2*>(p_.sums + i / 2 * p_.c + c)[i % 2] = {0, 0};
      }
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *p_.bad = 0;
  }

 private:
  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const uint32_t c = g * 1024 + threadIdx.x * 4;
      if (c < p_.c) f(g, c);
    }
  }

  // Whether this block writes channel c of what all blocks know.
  __device__ __forceinline__ bool in_slice(uint32_t c) const { return c - blockIdx.x * p_.slice < p_.slice; }

  __device__ __forceinline__ float4 mix_at(const SingleLayer& layer, bool time, uint32_t mixes, uint32_t i,
                                           uint32_t c) const {
    return fresh4(layer.mix[time ? 0 : 1] + (mixes >> 4 * i & 15 & (i < mixes >> 28 ? 15 : 0)) * p_.c + c);
  }

  __device__ __forceinline__ void put(W* to, float4 v) const {
    store_vector<W, 4>(to, {{static_cast<W>(v.x), static_cast<W>(v.y), static_cast<W>(v.z), static_cast<W>(v.w)}});
  }

  // The values of the layer before.
  __device__ __forceinline__ void add_values(Fours& x) const {
    const bool bad = __ldcg(reinterpret_cast<const unsigned long long*>(p_.bad)) != 0;
    each([&](int g, uint32_t c) {
      longlong2 low{}, high{};
#pragma unroll
      for (int i = 0; i < kSumCopies<V>; i++) {
        const auto* sums = reinterpret_cast<const longlong2*>(p_.sums + i * p_.c + c);
        const longlong2 a = __ldcg(sums), b = __ldcg(sums + 1);
        low.x += a.x, low.y += a.y, high.x += b.x, high.y += b.y;
      }
      const auto real = [&](long long sum) { return bad ? nanf("") : static_cast<float>(sum) * (1.0f / kFixedScale); };
      x[g] = x[g] + make_float4(real(low.x), real(low.y), real(high.x), real(high.y));
    });
  }

  // By the mean of each warp's channels, the squares around that, and how many channels there are.
  __device__ __forceinline__ RowScale scale_of(const Fours& x, float4* moments) const {
    float sum = 0.0f, squares = 0.0f;
    each([&](int g, uint32_t) { sum += (x[g].x + x[g].y) + (x[g].z + x[g].w); });
    const uint32_t warp = threadIdx.x / 32;
    const auto channels = static_cast<float>((p_.c / 128 + 7 - warp) / 8 * 128);  // C is a multiple of 256
    const float mean = reduce_lanes(sum, Add{}) / fmaxf(channels, 1.0f);
    each([&](int g, uint32_t) {
      const float4 d = make_float4(x[g].x - mean, x[g].y - mean, x[g].z - mean, x[g].w - mean);
      squares += (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w);
    });
    squares = reduce_lanes(squares, Add{});
    if (threadIdx.x % 32 == 0) moments[warp] = make_float4(mean, squares, channels, 0.0f);
    sync_readers();
    const float inverse = 1.0f / static_cast<float>(p_.c);
    float4 of[kReaders / 32];
    float whole = 0.0f, all = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < kReaders / 32; w++) of[w] = moments[w], whole += of[w].x * of[w].z;
    whole *= inverse;
#pragma unroll
    for (uint32_t w = 0; w < kReaders / 32; w++) all += of[w].y + of[w].z * (of[w].x - whole) * (of[w].x - whole);
    const float scale = rsqrtf(all * inverse + 1e-5f);
    return {scale, -whole * scale};
  }

  const Single& p_;
  const TokenRow token_;
  float4 kept_{};
  float* kept_to_ = nullptr;
};

}  // namespace cog_rwkv

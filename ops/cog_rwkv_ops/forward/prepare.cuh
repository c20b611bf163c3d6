// What wkv7_ reads of many tokens, from their projections: time_mix_prepare, and the biases of the low-rank ones.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/math.h"
#include "../csrc/reduce.cuh"

namespace cog_rwkv {

// W is the dtype of the activations, [tokens, heads, 64] each.
template <class W>
struct Prepare {
  const W *k, *v, *a, *w, *v_mix;  // v_mix null in the first layer
  W* v_first;                      // where the first layer writes its values; the others read it
  const float *a0, *w0, *v0;       // [heads, 64]: biases of a, w and v_mix
  const float *k_k, *k_a;          // [heads, 64]
  W *k_out, *v_out, *minus_kk, *kk_a, *w_out;
  int64_t count, heads;  // count: tokens * heads
};

template <class W>
__device__ __forceinline__ float2 load_pair(const W* p) {
  const Vector<W, 2> v = load_vector<W, 2>(p);
  return make_float2(v.values[0], v.values[1]);
}

template <class W>
__device__ __forceinline__ void store_pair(W* p, float x, float y) {
  store_vector<W, 2>(p, {{static_cast<W>(x), static_cast<W>(y)}});
}

// A warp a head of a token, two neighbouring channels a lane.
template <class W>
__global__ void __launch_bounds__(256) prepare_kernel(const Prepare<W> p) {
  wait_for_previous();
  let_next_begin();
  const int lane = threadIdx.x % 32;
  const int64_t step = gridDim.x * int64_t{8};
  for (int64_t head = blockIdx.x * int64_t{8} + threadIdx.x / 32; head < p.count; head += step) {
    const int64_t i = head * 64 + 2 * lane, c = head % p.heads * 64 + 2 * lane;
    const float2 k = load_pair(p.k + i), a = load_pair(p.a + i), w = load_pair(p.w + i);
    const float2 a0 = load_pair(p.a0 + c), w0 = load_pair(p.w0 + c), k_k = load_pair(p.k_k + c);
    const float2 k_a = load_pair(p.k_a + c);
    float2 v = load_pair(p.v + i);
    if (p.v_mix != nullptr) {
      const float2 mix = load_pair(p.v_mix + i), first = load_pair(p.v_first + i), v0 = load_pair(p.v0 + c);
      v.x += (first.x - v.x) * sigmoid(mix.x + v0.x), v.y += (first.y - v.y) * sigmoid(mix.y + v0.y);
    } else {
      store_pair(p.v_first + i, v.x, v.y);
    }
    store_pair(p.v_out + i, v.x, v.y);
    store_pair(p.w_out + i, w.x + w0.x, w.y + w0.y);
    const float rate_x = sigmoid(a.x + a0.x), rate_y = sigmoid(a.y + a0.y);
    store_pair(p.k_out + i, k.x * (1.0f + (rate_x - 1.0f) * k_a.x), k.y * (1.0f + (rate_y - 1.0f) * k_a.y));
    const float kk_x = k.x * k_k.x, kk_y = k.y * k_k.y;
    const float scale = 1.0f / fmaxf(sqrtf(reduce_lanes(kk_x * kk_x + kk_y * kk_y, Add{})), 1e-12f);
    store_pair(p.minus_kk + i, -(kk_x * scale), -(kk_y * scale));
    store_pair(p.kk_a + i, kk_x * scale * rate_x, kk_y * scale * rate_y);
  }
}

template <class W>
void prepare(const char* op, cudaStream_t stream, const Prepare<W>& p) {
  launch_chained(op, stream, prepare_kernel<W>, dim3(blocks(p.count, 8)), dim3(256), 0, p);
}

}  // namespace cog_rwkv

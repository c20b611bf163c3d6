// What wkv7_ reads of many tokens, from their projections: time_mix_prepare, and the biases of the low-rank ones.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/eights.cuh"
#include "../csrc/fast_math.cuh"
#include "../csrc/reduce.cuh"

namespace cog_rwkv {

// W is the dtype of the activations, [tokens, heads, 64] each.
template <class W>
struct Prepare {
  const W *k, *v, *a, *v_mix;  // v_mix null in the first layer
  W* v_first;                  // where the first layer writes its values; the others read it
  const float *a0, *v0;        // [heads, 64]: biases of a and v_mix
  const float *k_k, *k_a;      // [heads, 64]
  W *k_out, *v_out, *minus_kk, *kk_a;
  int64_t tokens, heads;
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

template <class W>
__global__ void __launch_bounds__(kEightsThreads, kEightsBlocks) prepare_kernel(const Prepare<W> p) {
  const uint32_t channels = static_cast<uint32_t>(p.heads) * 64;
  Eights place(p.tokens * channels / 8, channels);
  float a0[8], v0[8] = {}, k_k[8], k_a[8];
  load_eight(a0, p.a0 + place.channel), load_eight(k_k, p.k_k + place.channel), load_eight(k_a, p.k_a + place.channel);
  if (p.v_mix != nullptr) load_eight(v0, p.v0 + place.channel);
  wait_for_previous();
  let_next_begin();
  const bool mixes = p.v_mix != nullptr;
  for (; place.any(); place.next()) {
    const int64_t i = place.at * 8;
    float k[8] = {}, rate[8] = {}, kk[8] = {}, squares = 0.0f;
    if (place.inside()) {
      const Vector<W, 8> key = load_vector<W, 8>(p.k + i), a = load_vector<W, 8>(p.a + i);
      const Vector<W, 8> value = load_vector<W, 8>(p.v + i);
      // The first layer takes its values for both: all loads are on their way before the first is used.
      const Vector<W, 8> mix = load_vector<W, 8>((mixes ? p.v_mix : p.v) + i);
      const Vector<W, 8> first = load_vector<W, 8>((mixes ? p.v_first : p.v) + i);
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        v[j] = static_cast<float>(value.values[j]);
        const float part = sigmoid_fast(static_cast<float>(mix.values[j]) + v0[j]);
        if (mixes) v[j] += (static_cast<float>(first.values[j]) - v[j]) * part;
      }
      if (!mixes) store_eight(p.v_first + i, v);
      store_eight(p.v_out + i, v);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        rate[j] = sigmoid_fast(static_cast<float>(a.values[j]) + a0[j]);
        k[j] = static_cast<float>(key.values[j]);
        kk[j] = k[j] * k_k[j];
        squares += kk[j] * kk[j];
        k[j] *= 1.0f + (rate[j] - 1.0f) * k_a[j];
      }
      store_eight(p.k_out + i, k);
    }
    const float scale = rsqrtf(fmaxf(reduce_lanes<8>(squares, Add{}), 1e-24f));
    if (!place.inside()) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) kk[j] *= -scale, rate[j] *= -kk[j];
    store_eight(p.minus_kk + i, kk), store_eight(p.kk_a + i, rate);
  }
}

template <class W>
void prepare(const char* op, cudaStream_t stream, const Prepare<W>& p, int multiprocessors) {
  const dim3 grid(eights_blocks(p.tokens, p.heads * 64, multiprocessors));
  launch_chained(op, stream, prepare_kernel<W>, grid, dim3(kEightsThreads), 0, p);
}

}  // namespace cog_rwkv

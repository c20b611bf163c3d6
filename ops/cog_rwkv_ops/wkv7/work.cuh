// What the CUDA kernels of wkv7 share: where things lie, which sequences are whose, and what is no token's.
#pragma once

#include "../csrc/chain.cuh"
#include "../csrc/math.h"
#include "../csrc/packed.cuh"
#include "wkv7.h"

namespace cog_rwkv {

enum Input { kR, kW, kK, kV, kA, kB };

struct Layout {
  const int64_t *rows, *cu_seqlens;  // null: sequence i has row i, and the tokens i * each to (i + 1) * each
  int64_t batch, tokens, heads, pool_rows, in_stride, out_stride, each;
  bool aligned;               // the states allow loads of four at a time
  int64_t shortest, longest;  // the sequences that a launch is for
  bool alone;                 // it is also for tokens without a sequence, and those whose row there is not

  __device__ bool takes(const Sequence& s) const {
    const int64_t length = s.end - s.begin;
    return length >= shortest && length <= longest;
  }

  // Sequences to look at for those of `size` tokens or more, so that a long one costs no blocks for its short
  // neighbours.
  __host__ __device__ int64_t candidates(int64_t size) const {
    return rows == nullptr || size < 2 || batch <= tokens / size ? batch : tokens / size;
  }
  // Number j of these, or -1: who has the last of the j-th `size` tokens, if it is among its own first `size`. So each
  // long sequence is found once.
  __device__ int64_t candidate(int64_t j, int64_t size) const {
    if (candidates(size) == batch) return j;
    const int64_t t = (j + 1) * size - 1, i = sequence_of(cu_seqlens, batch, t);
    return i >= 0 && t - cu_seqlens[i] < size ? i : -1;
  }
  // Whether sequence i, of `size` tokens or more, is one of them: not where cu_seqlens decreases.
  __device__ bool is_candidate(const Sequence& s, int64_t i, int64_t size) const {
    return candidates(size) == batch || candidate(s.begin / size, size) == i;
  }
};

// T is the dtype of the activations, S that of the states; void where the kernel asks at run time.
template <class T, class S>
struct Wkv7 : Layout {
  const T* in[6];  // r, w, k, v, a, b, each [tokens, heads, 64]
  T* y;            // [tokens, heads, 64]
  const S* state;  // rows of [heads, 64, 64], in_stride apart
  S* state_out;    // the same rows, out_stride apart

  template <class As>
  Wkv7<T, As> with_states() const {
    return {*this,
            {in[0], in[1], in[2], in[3], in[4], in[5]},
            y,
            static_cast<const As*>(state),
            static_cast<As*>(state_out)};
  }
};

__device__ inline Sequence sequence_of_block(const Layout& p, int64_t i) {
  if (p.rows == nullptr) return {i * p.each, (i + 1) * p.each, i, true};
  return sequence_at(p.rows, p.cu_seqlens, i, p.tokens, p.pool_rows);
}

// Four values of a state.
template <class S>
__device__ __forceinline__ float4 load4(const S* p, bool aligned) {
  const Vector<S, 4> x = aligned ? load_vector<S, 4>(p) : Vector<S, 4>{{p[0], p[1], p[2], p[3]}};
  return make_float4(x.values[0], x.values[1], x.values[2], x.values[3]);
}

template <class S>
__device__ __forceinline__ void store4(S* p, float4 x, bool aligned) {
  const Vector<S, 4> rounded{{static_cast<S>(x.x), static_cast<S>(x.y), static_cast<S>(x.z), static_cast<S>(x.w)}};
  if (aligned) {
    store_vector<S, 4>(p, rounded);
  } else {
    for (int i = 0; i < 4; i++) p[i] = rounded.values[i];
  }
}

// By all threads of a block.
template <class T, class S>
__device__ void fill_nan(const Wkv7<T, S>& p, int64_t head, int64_t begin, int64_t end) {
  if (end <= begin) return;
  for (int64_t j = threadIdx.x; j < (end - begin) * kHead; j += blockDim.x) {
    p.y[((begin + j / kHead) * p.heads + head) * kHead + j % kHead] = static_cast<T>(nanf(""));
  }
}

// NaN for the tokens that are in no sequence: before the first, after the last, and in one that sequence_at refused.
template <class T, class S>
__device__ void fill_gaps(const Wkv7<T, S>& p, int64_t i, int64_t head, bool empty) {
  const int64_t begin = p.cu_seqlens[i], end = p.cu_seqlens[i + 1];
  if (i == 0) fill_nan(p, head, 0, min(begin, p.tokens));
  if (i == p.batch - 1) fill_nan(p, head, max(end, int64_t{0}), p.tokens);
  if (empty) fill_nan(p, head, max(begin, int64_t{0}), min(end, p.tokens));
}

}  // namespace cog_rwkv

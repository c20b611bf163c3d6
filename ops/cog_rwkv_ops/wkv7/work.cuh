// What the two CUDA kernels of wkv7 share: where things lie, which sequences are whose, and what is no token's.
#pragma once

#include "../csrc/cuda.cuh"
#include "../csrc/packed.cuh"
#include "wkv7.h"

namespace cog_rwkv {

enum Input { kR, kW, kK, kV, kA, kB };

struct Layout {
  const int64_t *rows, *cu_seqlens;  // null: sequence i has row i, and the tokens i * each to (i + 1) * each
  int64_t batch, tokens, heads, pool_rows, in_stride, out_stride, each;
  bool aligned;               // the states allow loads of four at a time
  int64_t shortest, longest;  // the sequences that a launch is for
  float* checkpoints;         // [batch, heads, chunks, 64, 64], the state before each chunk; or null

  __device__ bool takes(const Sequence& s) const {
    const int64_t length = s.end - s.begin;
    return length >= shortest && length <= longest;
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

}  // namespace cog_rwkv

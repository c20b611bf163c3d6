// What the kernels of time_mix_prepare take.
#pragma once

namespace cog_rwkv {

template <class T>
struct PrepareArgs {
  const T *k, *v, *a, *v_first, *v_mix;  // [tokens, heads, 64]; the last two may be null
  const float *k_k, *k_a;                // [heads, 64]
  T *k_out, *v_out, *minus_kk, *kk_a;    // like k
};

}  // namespace cog_rwkv

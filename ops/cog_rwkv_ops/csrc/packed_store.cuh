// Stores of several 16-bit values at once.
#pragma once

#include <cstring>

#include "cuda.cuh"

namespace cog_rwkv {

// store_vector to global memory, as one instruction for certain: the compiler has been seen to take one for each value.
template <class T, int N>
__device__ __forceinline__ void store_packed(T* to, const Vector<T, N>& v) {
  constexpr int words = sizeof(v) / 4;
  static_assert(words == 2 || words == 4);
  uint32_t word[words];
  std::memcpy(word, &v, sizeof(v));
#if defined(__CUDA_ARCH__)
  if constexpr (words == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  }
#else
  std::memcpy(to, word, sizeof(v));
#endif
}

}  // namespace cog_rwkv

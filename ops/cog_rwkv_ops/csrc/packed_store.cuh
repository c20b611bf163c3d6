// Stores of several 16-bit values as whole words.
#pragma once

#include <cstring>

#include "cuda.cuh"

namespace cog_rwkv {

// store_vector, where the compiler might store the values one by one: it has been seen to.
template <class T, int N>
__device__ __forceinline__ void store_packed(T* to, const Vector<T, N>& v) {
  Vector<uint32_t, sizeof(T) * N / 4> words;
  std::memcpy(&words, &v, sizeof(v));
  store_vector(reinterpret_cast<uint32_t*>(to), words);
}

}  // namespace cog_rwkv

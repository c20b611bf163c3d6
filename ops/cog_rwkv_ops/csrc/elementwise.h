// CPU loop of operators whose output element i depends on the inputs' elements i alone.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "dtype.h"

namespace cog_rwkv {

// out[i] = f(in[i]...) for i < n, all of type T, arithmetic in arithmetic_t<T>. f must inline (a lambda does).
template <class T, class F, class... In>
void elementwise_cpu(T* __restrict out, int64_t n, const F& f, const In* __restrict... in) {
  using A = arithmetic_t<T>;
  constexpr int64_t grain = 16384;  // enough work to be worth waking a thread
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    best_cpu([&] {
      for (int64_t i = begin; i < end; i++) out[i] = static_cast<T>(f(static_cast<A>(in[i])...));
    });
  });
}

}  // namespace cog_rwkv

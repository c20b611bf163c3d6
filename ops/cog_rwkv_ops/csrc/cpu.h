// What CPU kernels share: PyTorch's own threads, and the best instructions of the machine they run on.
//
// The library is compiled for x86-64-v2. A kernel gets faster code in one of two ways:
//  - best_cpu([&] { loop; }) compiles the loop three times (x86-64-v2, AVX2, AVX-512) and runs the best one;
//  - a function marked COG_RWKV_AVX2 or COG_RWKV_AVX512 uses intrinsics, behind `if (cpu() >= Cpu::avx2)`.
// No macro such as __AVX2__ is defined in either: the choice is made at run time, once.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#define COG_RWKV_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#define COG_RWKV_AVX512 \
  __attribute__((target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define COG_RWKV_INLINE __attribute__((always_inline)) inline

namespace cog_rwkv {

enum class Cpu { baseline, avx2, avx512 };

inline Cpu detect_cpu() {
  Cpu best = Cpu::baseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  best = avx512 ? Cpu::avx512 : avx2 ? Cpu::avx2 : Cpu::baseline;
#endif
  // For tests and measurements: COG_RWKV_CPU=baseline or avx2 lowers the choice, nothing raises it.
  const char* wanted = std::getenv("COG_RWKV_CPU");
  if (wanted && std::string_view(wanted) == "baseline") best = Cpu::baseline;
  if (wanted && std::string_view(wanted) == "avx2") best = std::min(best, Cpu::avx2);
  return best;
}

// The best instructions here.
inline Cpu cpu() {
  static const Cpu best = detect_cpu();
  return best;
}

#if defined(__x86_64__)
// flatten pulls the body, and all that it calls, into the function with the target, so that the compiler
// vectorises it for that target. What cannot be inlined (libm, PyTorch) stays a call.
template <class Body>
COG_RWKV_AVX2 __attribute__((flatten, noinline)) void call_avx2(const Body& body) {
  body();
}
template <class Body>
COG_RWKV_AVX512 __attribute__((flatten, noinline)) void call_avx512(const Body& body) {
  body();
}
#endif

// Runs body() in the variant for this machine. Keep parallel_for outside of it.
template <class Body>
void best_cpu(const Body& body) {
#if defined(__x86_64__)
  if (cpu() == Cpu::avx512) return call_avx512(body);
  if (cpu() == Cpu::avx2) return call_avx2(body);
#endif
  body();
}

// body(begin, end) over cuts of [0, n) on PyTorch's thread pool (torch.set_num_threads holds), at least `grain`
// items a cut. A result must not depend on the cuts. Small work runs on the calling thread without a call.
template <class Body>
void parallel_for(int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  if (n <= grain) return body(int64_t{0}, n);
  torch::stable::parallel_for(0, n, grain, body);
}

}  // namespace cog_rwkv

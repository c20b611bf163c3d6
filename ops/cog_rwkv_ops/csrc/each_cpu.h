// Compiles a header of CPU kernels three times, for x86-64-v2, AVX2 and AVX-512 (elsewhere once, for the machine):
//
//   #define COG_RWKV_KERNELS "kernel.h"         the operator's own, beside the .cpp: "../layer_norm/kernel.h"
//   #include "../csrc/each_cpu.h"
//   ...
//   COG_RWKV_KERNEL(layer_norm_rows<float>)(...)
//
// The header is written with V, 16 floats at a time (vec_*.h). It is read inside a namespace named after the
// instruction set, so it has no include guard and no #include but of such headers, and it uses nothing from the
// standard library but plain types: a template of the standard library compiled here for AVX-512 could be the one
// copy that the linker keeps for all. best_cpu() of cpu.h does for loops that the compiler vectorises; these headers
// are for those where the order of the sums is fixed by hand.
#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "dtype.h"

#ifndef COG_RWKV_KERNELS
#error "define COG_RWKV_KERNELS, the header of kernels, first"
#endif

#if defined(__x86_64__) && !defined(__clang__)
#define COG_RWKV_X86_KERNELS 1
#else
#define COG_RWKV_X86_KERNELS 0
#endif

namespace cog_rwkv {
namespace {

namespace baseline {
#include "vec_baseline.h"
#include "vec_common.h"
#include COG_RWKV_KERNELS
}  // namespace baseline

#if COG_RWKV_X86_KERNELS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
namespace avx2 {
#include "vec_avx2.h"
#include "vec_common.h"
#include COG_RWKV_KERNELS
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#include "vec_avx512.h"
#include "vec_common.h"
#include COG_RWKV_KERNELS
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

}  // namespace
}  // namespace cog_rwkv

// The kernel `name` for this machine.
#if COG_RWKV_X86_KERNELS
#define COG_RWKV_KERNEL(...) \
  (cpu() == Cpu::avx512 ? &avx512::__VA_ARGS__ : cpu() == Cpu::avx2 ? &avx2::__VA_ARGS__ : &baseline::__VA_ARGS__)
#else
#define COG_RWKV_KERNEL(...) (&baseline::__VA_ARGS__)
#endif

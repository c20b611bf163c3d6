// Products of 16-bit tiles in shared memory by Hopper's tensor cores.
//
// A tile of a matrix is made of lines of 64 values, 128 bytes, whose 16-byte pieces are stored in another order: piece
// c of line l is at c ^ (l % 8). It is the order that wgmma calls the 128-byte swizzle, that TMA copies in, and that
// ldmatrix reads without bank conflicts. A line runs along the terms of the sums ("deep"), one for each row of the
// result; or, "wide", along the rows of the result, one for each of 64 terms, in blocks of 64 rows.
#pragma once

#include <array>
#include <atomic>
#include <type_traits>

#include "cuda.cuh"
#include "shared.cuh"

// wgmma exists on compute capability 9.0 only, and where the compiler was asked for 9.0a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define COG_RWKV_WGMMA 1
#else
#define COG_RWKV_WGMMA 0
#endif

namespace cog_rwkv {

constexpr int kLine = 64;              // values in a line
constexpr int kBlockBytes = 64 * 128;  // 64 lines

// Where piece `piece` of line `line` is, in bytes from the first line, which lies on a multiple of 1024.
__device__ __forceinline__ uint32_t swizzled(int line, int piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }

// Has twice the threads where it was compiled for 9.0a: that is how the host learns whether wgmma is there, also where
// the driver compiled the kernels.
static __global__ void __launch_bounds__(COG_RWKV_WGMMA ? 64 : 32) has_wgmma_kernel() {}

// Whether the current device has wgmma, and the kernels were compiled with it.
inline bool has_wgmma(const char* op) {
  static std::array<std::atomic<int>, 64> known{};  // 1: no, 2: yes
  if (plain_gpu()) return false;
  int device = 0, major = 0, minor = 0;
  check_cuda(op, cudaGetDevice(&device));
  std::atomic<int>& mine = known[device % known.size()];
  if (mine == 0) {
    check_cuda(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check_cuda(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    cudaFuncAttributes code{};
    check_cuda(op, cudaFuncGetAttributes(&code, has_wgmma_kernel));
    mine = major == 9 && minor == 0 && code.maxThreadsPerBlock == 64 ? 2 : 1;
  }
  return mine == 2;
}

#if COG_RWKV_WGMMA
// What wgmma is told about a tile: its address, the bytes from one block of 64 rows to the next (wide tiles), the bytes
// from 8 lines to the next 8, the 128-byte swizzle.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  const uint64_t low = (address & 0x3ffff) >> 4, next_block = kBlockBytes >> 4, next_lines = 1024 >> 4;
  return low | next_block << 16 | next_lines << 32 | uint64_t{1} << 62;
}

// The bytes from 16 terms of a tile to the next: a wide one has 16 lines where a deep one has 32 bytes of each.
template <bool wide>
constexpr int kSixteenTerms = wide ? 16 * 128 : 32;

#define COG_RWKV_8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define COG_RWKV_16(d, i) COG_RWKV_8(d, i), COG_RWKV_8(d, i + 8)
#define COG_RWKV_32(d, i) COG_RWKV_16(d, i), COG_RWKV_16(d, i + 16)
#define COG_RWKV_64(d, i) COG_RWKV_32(d, i), COG_RWKV_32(d, i + 32)

#define COG_RWKV_SUMS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define COG_RWKV_SUMS16 COG_RWKV_SUMS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define COG_RWKV_SUMS32 COG_RWKV_SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define COG_RWKV_SUMS24 COG_RWKV_SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define COG_RWKV_SUMS48 COG_RWKV_SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define COG_RWKV_SUMS56 COG_RWKV_SUMS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define COG_RWKV_SUMS64                                              \
  COG_RWKV_SUMS32                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define COG_RWKV_SUMS80 COG_RWKV_SUMS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define COG_RWKV_SUMS96 COG_RWKV_SUMS80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define COG_RWKV_SUMS104 COG_RWKV_SUMS96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define COG_RWKV_SUMS120                                                                                         \
  COG_RWKV_SUMS96                                                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%" \
  "118,%119"
#define COG_RWKV_SUMS128 COG_RWKV_SUMS120 ",%120,%121,%122,%123,%124,%125,%126,%127"

// d += 16 terms of 64 rows times N rows, by the four warps of a warp group. `n`: N; the four numbers are those of the
// operands behind the sums.
#define COG_RWKV_WGMMA_OF(type, n, sums, a, b, a_wide, b_wide, ...)                                                    \
  asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" sums "}, %" #a ", %" #b ", add, 1, 1, %" #a_wide ", %" #b_wide ";}"                                \
               : __VA_ARGS__                                                                                           \
               : "l"(left), "l"(right), "n"(int(left_wide)), "n"(int(right_wide)))
#define COG_RWKV_WGMMA_ANY(...)                \
  if constexpr (std::is_same_v<T, BFloat16>) { \
    COG_RWKV_WGMMA_OF("bf16", __VA_ARGS__);    \
  } else {                                     \
    COG_RWKV_WGMMA_OF("f16", __VA_ARGS__);     \
  }

template <class T, int N, bool left_wide, bool right_wide>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t left, uint64_t right) {
  if constexpr (N == 16) {
    COG_RWKV_WGMMA_ANY(16, COG_RWKV_SUMS8, 8, 9, 10, 11, COG_RWKV_8(d, 0))
  } else if constexpr (N == 32) {
    COG_RWKV_WGMMA_ANY(32, COG_RWKV_SUMS16, 16, 17, 18, 19, COG_RWKV_16(d, 0))
  } else if constexpr (N == 48) {
    COG_RWKV_WGMMA_ANY(48, COG_RWKV_SUMS24, 24, 25, 26, 27, COG_RWKV_16(d, 0), COG_RWKV_8(d, 16))
  } else if constexpr (N == 64) {
    COG_RWKV_WGMMA_ANY(64, COG_RWKV_SUMS32, 32, 33, 34, 35, COG_RWKV_32(d, 0))
  } else if constexpr (N == 96) {
    COG_RWKV_WGMMA_ANY(96, COG_RWKV_SUMS48, 48, 49, 50, 51, COG_RWKV_32(d, 0), COG_RWKV_16(d, 32))
  } else if constexpr (N == 112) {
    COG_RWKV_WGMMA_ANY(112, COG_RWKV_SUMS56, 56, 57, 58, 59, COG_RWKV_32(d, 0), COG_RWKV_16(d, 32), COG_RWKV_8(d, 48))
  } else if constexpr (N == 128) {
    COG_RWKV_WGMMA_ANY(128, COG_RWKV_SUMS64, 64, 65, 66, 67, COG_RWKV_64(d, 0))
  } else if constexpr (N == 160) {
    COG_RWKV_WGMMA_ANY(160, COG_RWKV_SUMS80, 80, 81, 82, 83, COG_RWKV_64(d, 0), COG_RWKV_16(d, 64))
  } else if constexpr (N == 192) {
    COG_RWKV_WGMMA_ANY(192, COG_RWKV_SUMS96, 96, 97, 98, 99, COG_RWKV_64(d, 0), COG_RWKV_32(d, 64))
  } else if constexpr (N == 208) {
    COG_RWKV_WGMMA_ANY(208, COG_RWKV_SUMS104, 104, 105, 106, 107, COG_RWKV_64(d, 0), COG_RWKV_32(d, 64),
                       COG_RWKV_8(d, 96))
  } else if constexpr (N == 240) {
    COG_RWKV_WGMMA_ANY(240, COG_RWKV_SUMS120, 120, 121, 122, 123, COG_RWKV_64(d, 0), COG_RWKV_32(d, 64),
                       COG_RWKV_16(d, 96), COG_RWKV_8(d, 112))
  } else if constexpr (N == 256) {
    COG_RWKV_WGMMA_ANY(256, COG_RWKV_SUMS128, 128, 129, 130, 131, COG_RWKV_64(d, 0), COG_RWKV_64(d, 64))
  } else {
    static_assert(N < 0, "this width has no line here");
  }
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the last `pending` commits.
template <int pending>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Behind wait_wgmma<0>(): nothing that reads these is moved before it.
template <int COUNT>
__device__ __forceinline__ void sums_ready(float (&sums)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) asm volatile("" : "+f"(sums[j])::"memory");
}
#endif

}  // namespace cog_rwkv

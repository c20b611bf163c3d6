// Products of matrices on tensor cores in tf32, which keeps 11 bits of a float32 and its range. Where that is too few
// (`split`), x = big + small and a product is big big + big small + small big: float32 but for about two bits. And what
// feeds them: 16-byte asynchronous copies into shared memory.
#pragma once

#include "fast_math.cuh"
#include "shared.cuh"

namespace cog_rwkv {

// A result of 16 x 8: this lane has (g, 2 q), (g, 2 q + 1), (g + 8, 2 q), (g + 8, 2 q + 1), g = lane / 4, q = lane % 4.
using Sums = float[4];

// A left operand of 16 x 8: (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4); a right one of 8 x 8: (q, g), (q + 4, g).
using Left = float[4];
using Right = float[2];

// x as an operand that is not split: to nearest, where the tensor cores themselves would cut it off.
template <bool split>
__device__ __forceinline__ float operand(float x) {
  return split ? x : __uint_as_float(__float_as_uint(x) + 0x1000u);
}

__device__ __forceinline__ float big_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

__device__ __forceinline__ void mma(Sums& sums, const Left& a, const Right& b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// sums += a b.
struct TileProduct {
  Sums& sums;
  Sums& fine;  // gets the lesser products of a split one: two chains are shorter than one
  const Left& a;
  const Right b;
};

// of(0) to of(count - 1), each a TileProduct with sums of its own. A warp waits for a product before it adds to the
// same sums again, so those that are alike stand together. `exact_a`, `exact_b`: all of that operand is its big part.
template <bool split, int count, bool exact_a = false, bool exact_b = false, class F>
__device__ __forceinline__ void multiply(F of) {
  if constexpr (split && !exact_a) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const TileProduct p = of(i);
      const Left small = {p.a[0] - big_part(p.a[0]), p.a[1] - big_part(p.a[1]), p.a[2] - big_part(p.a[2]),
                          p.a[3] - big_part(p.a[3])};
      mma(p.fine, small, {big_part(p.b[0]), big_part(p.b[1])});
    }
  }
  if constexpr (split && !exact_b) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const TileProduct p = of(i);
      const Left big = {big_part(p.a[0]), big_part(p.a[1]), big_part(p.a[2]), big_part(p.a[3])};
      mma(p.fine, big, {p.b[0] - big_part(p.b[0]), p.b[1] - big_part(p.b[1])});
    }
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    const TileProduct p = of(i);
    mma(p.sums, p.a, p.b);  // the tensor cores see the big parts alone
  }
}

// 16 bytes, both ends on 16-byte boundaries; zeros where `inside` is false, and then `from` is not read.
__device__ __forceinline__ void copy16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// Until this thread's copies have arrived; a __syncwarp() later the warp's have.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cog_rwkv

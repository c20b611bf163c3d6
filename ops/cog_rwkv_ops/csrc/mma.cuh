// Tensor cores on sums of bfloat16: x = x0 + x1 (+ x2), each what the ones before leave. A product of two matrices is
// that of their parts, without those past the precision wanted: three of 2 parts (error near 1e-5) or six of 3 parts
// (that of float32), with sums in float32, whatever the size of the numbers. And what feeds them: 16-byte asynchronous
// copies into shared memory, and barriers that one warp waits on while others arrive.
//
// Matrices lie in shared memory as rows of bfloat16, the parts of a row one behind the other, `part_bytes` apart. Rows
// that are an odd multiple of 16 bytes apart are read without bank conflicts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cog_rwkv {

// Two neighbours in parts, each packed: the first in the low half.
template <int parts>
struct Pair {
  uint32_t part[parts];
};

// An operand of 16 x 16.
template <int parts>
struct Tile {
  uint32_t part[parts][4];
};

// A right operand of 16 x 8.
template <int parts>
struct Right {
  uint32_t part[parts][2];
};

// A result of 16 x 8: this lane has (g, 2 q), (g, 2 q + 1), (g + 8, 2 q), (g + 8, 2 q + 1), g = lane / 4, q = lane % 4.
using Sums = float[4];

__device__ __forceinline__ uint32_t pack_bfloat16(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

template <int parts>
__device__ __forceinline__ Pair<parts> split(float first, float second) {
  Pair<parts> pair;
#pragma unroll
  for (int i = 0; i < parts; i++) {
    pair.part[i] = pack_bfloat16(first, second);
    first -= __uint_as_float(pair.part[i] << 16);
    second -= __uint_as_float(pair.part[i] & 0xffff0000u);
  }
  return pair;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where this lane points ldmatrix, in a matrix of 16 rows.
__device__ __forceinline__ uint32_t tile_address(const char* matrix, int row_bytes, int lane) {
  return shared_address(matrix) + (lane % 16) * row_bytes + (lane / 16) * 16;
}

__device__ __forceinline__ void ldmatrix(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// A left operand as it lies, or a right one whose columns lie as rows.
template <int parts>
__device__ __forceinline__ Tile<parts> load_tile(uint32_t address, int part_bytes) {
  Tile<parts> tile;
#pragma unroll
  for (int i = 0; i < parts; i++) ldmatrix(tile.part[i], address + i * part_bytes);
  return tile;
}

// The other way round.
template <int parts>
__device__ __forceinline__ Tile<parts> load_tile_transposed(uint32_t address, int part_bytes) {
  Tile<parts> tile;
#pragma unroll
  for (int i = 0; i < parts; i++) ldmatrix_transposed(tile.part[i], address + i * part_bytes);
  return tile;
}

// The 8 columns `half` of a right operand, out of load_tile().
template <int parts>
__device__ __forceinline__ Right<parts> right(const Tile<parts>& t, int half) {
  Right<parts> r;
#pragma unroll
  for (int i = 0; i < parts; i++) r.part[i][0] = t.part[i][half], r.part[i][1] = t.part[i][half + 2];
  return r;
}

// The same out of load_tile_transposed().
template <int parts>
__device__ __forceinline__ Right<parts> right_transposed(const Tile<parts>& t, int half) {
  Right<parts> r;
#pragma unroll
  for (int i = 0; i < parts; i++) r.part[i][0] = t.part[i][2 * half], r.part[i][1] = t.part[i][2 * half + 1];
  return r;
}

// A left operand out of load_tile_transposed().
template <int parts>
__device__ __forceinline__ Tile<parts> left_transposed(const Tile<parts>& t) {
  Tile<parts> l = t;
#pragma unroll
  for (int i = 0; i < parts; i++) l.part[i][1] = t.part[i][2], l.part[i][2] = t.part[i][1];
  return l;
}

// A left operand out of two results side by side, each 16 x 8.
template <int parts>
__device__ __forceinline__ Tile<parts> left_of(const Sums& a, const Sums& b) {
  const Pair<parts> p[4] = {split<parts>(a[0], a[1]), split<parts>(a[2], a[3]), split<parts>(b[0], b[1]),
                            split<parts>(b[2], b[3])};
  Tile<parts> t;
#pragma unroll
  for (int i = 0; i < parts; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) t.part[i][j] = p[j].part[i];
  }
  return t;
}

__device__ __forceinline__ void mma(Sums& sums, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// fine += a b but for the products of the first parts, which coarse gets. `exact`: `a` is its first part alone.
template <int parts, bool exact = false>
__device__ __forceinline__ void multiply(Sums& coarse, Sums& fine, const Tile<parts>& a, const Right<parts>& b) {
#pragma unroll
  for (int sum = parts - 1; sum > 0; sum--) {
#pragma unroll
    for (int i = exact ? 0 : sum; i >= 0; i--) mma(fine, a.part[i], b.part[sum - i]);
  }
  mma(coarse, a.part[0], b.part[0]);
}

template <int parts, bool exact = false>
__device__ __forceinline__ void multiply(Sums& sums, const Tile<parts>& a, const Right<parts>& b) {
  multiply<parts, exact>(sums, sums, a, b);
}

// Writes a result in parts, `to` where its element (0, 0) belongs.
template <int parts>
__device__ __forceinline__ void store_sums(char* to, int row_bytes, int part_bytes, const Sums& x, int lane) {
  to += (lane / 4) * row_bytes + (lane % 4) * 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Pair<parts> p = split<parts>(x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < parts; j++) *reinterpret_cast<uint32_t*>(to + i * 8 * row_bytes + j * part_bytes) = p.part[j];
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

// A barrier in shared memory: it turns to its next phase when `count` threads have arrived.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// Until the phase of this parity is over. The phase before the first counts as one of parity 1 that is.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
  }
}

}  // namespace cog_rwkv

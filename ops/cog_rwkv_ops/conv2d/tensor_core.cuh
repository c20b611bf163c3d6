// Products of tiles in shared memory on the tensor cores: what both kernels of conv2d for the half precisions share.
//
// A tile of a matrix is made of lines of 64 values, 128 bytes, whose 16-byte pieces are stored in another order: piece
// c of line l is at c ^ (l % 8). It is the order that wgmma calls the 128-byte swizzle, and ldmatrix reads it without
// bank conflicts. A line runs along the terms of the sums ("deep"), one for each row of the result; or, "wide", along
// the rows of the result, one for each of 64 terms, in blocks of 64 rows.
//
// The results of a warp are the same for wgmma and for mma: rows g and g + 8 of 16, columns 2 t and 2 t + 1 of each 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../csrc/cuda.cuh"

// wgmma exists on compute capability 9.0 only, and where the compiler was asked for 9.0a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define COG_RWKV_WGMMA 1
#else
#define COG_RWKV_WGMMA 0
#endif

namespace cog_rwkv {

constexpr int kLine = 64;              // values in a line
constexpr int kBlockBytes = 64 * 128;  // 64 lines

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from memory to shared memory, or zeros; complete at a later copies_arrived(). `again`: through the nearest
// cache, where the same bytes will be asked for again soon.
template <bool again = false>
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  if constexpr (again) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void copies_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Where piece `piece` of line `line` is, in bytes from the first line, which lies on a multiple of 1024.
__device__ __forceinline__ uint32_t swizzled(int line, int piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }

// ---- mma: any GPU from 8.0 on

template <bool wide>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (wide) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  }
}

// The address that a lane gives to ldmatrix for 16 rows from `row` on and 16 terms from `term` on. The four 8 x 8
// matrices come out as rows 0-7 terms 0-7, rows 8-15 terms 0-7, rows 0-7 terms 8-15, rows 8-15 terms 8-15.
template <bool wide>
__device__ __forceinline__ uint32_t matrices_at(uint32_t tile, int row, int term) {
  const int lane = threadIdx.x % 32, r = row + lane % 8 + lane / 8 % 2 * 8, t = term + lane / 16 * 8;
  if constexpr (!wide) return tile + swizzled(r, t / 8);
  const int r8 = row + lane / 8 % 2 * 8, term8 = term + lane / 16 * 8 + lane % 8;
  return tile + r8 / kLine * kBlockBytes + swizzled(term8, r8 % kLine / 8);
}

template <class T>
__device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// sum += 64 terms of 64 rows of `left` from `row` on, 16 for each warp of four, times N rows of `right` from `column`
// on.
template <class T, int N, bool left_wide, bool right_wide>
__device__ __forceinline__ void multiply_mma(float (&sum)[N / 2], uint32_t left, int row, uint32_t right, int column) {
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int term = 0; term < kLine; term += 16) {
    uint32_t a[4];
    load_matrices<left_wide>(a, matrices_at<left_wide>(left, row + 16 * warp, term));
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      uint32_t b[4];
      load_matrices<right_wide>(b, matrices_at<right_wide>(right, column + n, term));
      mma<T>(sum + n / 2, a, b[0], b[2]);
      mma<T>(sum + n / 2 + 4, a, b[1], b[3]);
    }
  }
}

// ---- wgmma

#if COG_RWKV_WGMMA
// What wgmma is told about a tile: its address, the bytes from one block of 64 rows to the next (wide tiles), the bytes
// from 8 lines to the next 8, the 128-byte swizzle.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  const uint64_t low = (address & 0x3ffff) >> 4, next_block = kBlockBytes >> 4, next_lines = 1024 >> 4;
  return low | next_block << 16 | next_lines << 32 | uint64_t{1} << 62;
}

#define COG_RWKV_8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define COG_RWKV_32(d, i) COG_RWKV_8(d, i), COG_RWKV_8(d, i + 8), COG_RWKV_8(d, i + 16), COG_RWKV_8(d, i + 24)
#define COG_RWKV_LIST32                                                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define COG_RWKV_LIST64                                                                               \
  COG_RWKV_LIST32                                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
  "%56,%57,%58,%59,%60,%61,%62,%63"
// The instruction for N = 64 and 128; "add to d" is a predicate.
#define COG_RWKV_WGMMA_64(type)                                                       \
  asm volatile(                                                                       \
      "{.reg .pred p; setp.ne.b32 p, %36, 0; "                                        \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " COG_RWKV_LIST32 \
      "}, %32, %33, p, 1, 1, %34, %35;}"                                              \
      : COG_RWKV_32(d, 0)                                                             \
      : "l"(a), "l"(b), "n"(int(left_wide)), "n"(int(right_wide)), "r"(1))
#define COG_RWKV_WGMMA_128(type)                                                       \
  asm volatile(                                                                        \
      "{.reg .pred p; setp.ne.b32 p, %68, 0; "                                         \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " COG_RWKV_LIST64 \
      "}, %64, %65, p, 1, 1, %66, %67;}"                                               \
      : COG_RWKV_32(d, 0), COG_RWKV_32(d, 32)                                          \
      : "l"(a), "l"(b), "n"(int(left_wide)), "n"(int(right_wide)), "r"(1))

// d += 16 terms of 64 rows times N rows, by the four warps of a warp group.
template <class T, int N, bool left_wide, bool right_wide>
__device__ __forceinline__ void wgmma(float* d, uint64_t a, uint64_t b) {
  static_assert(N == 64 || N == 128);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if constexpr (N == 64) {
      COG_RWKV_WGMMA_64("bf16");
    } else {
      COG_RWKV_WGMMA_128("bf16");
    }
  } else {
    if constexpr (N == 64) {
      COG_RWKV_WGMMA_64("f16");
    } else {
      COG_RWKV_WGMMA_128("f16");
    }
  }
}

// As multiply_mma, but under way when it returns: wait_wgmma<n>() waits for all but the last n.
template <class T, int N, bool left_wide, bool right_wide>
__device__ __forceinline__ void start_wgmma(float (&sum)[N / 2], uint32_t left, int row, uint32_t right, int column) {
  // From one row to the next 64, and from 16 terms to the next: a wide tile has 16 lines where a deep one has 32 bytes.
  constexpr int left_step = left_wide ? 16 * 128 : 32, right_step = right_wide ? 16 * 128 : 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < kLine / 16; k++) {
    const uint64_t b = descriptor(right + column / 64 * kBlockBytes + k * right_step);
    wgmma<T, N, left_wide, right_wide>(sum, descriptor(left + row / 64 * kBlockBytes + k * left_step), b);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
#endif

// ---- the loop over the terms

// How the 8 warps of a block share its tile: groups of four warps above each other (ROWS of them, 1 or 2) or side by
// side; each computes 64 rows and N columns. STAGES steps are in shared memory at once, so that BLOCKS blocks fit on a
// multiprocessor: while one waits for memory, the other multiplies.
template <int ROWS_, int N_, int STAGES_, int BLOCKS_, int THREADS_ = 256>
struct Shape {
  static constexpr int ROWS = ROWS_, N = N_, STAGES = STAGES_, BLOCKS = BLOCKS_, threads = THREADS_;
  static constexpr int height = 64 * ROWS, width = N * (2 / ROWS);
  static constexpr int bytes = (height + width) * 128;  // of one stage
  static constexpr int shared = STAGES * bytes + 1024;  // tiles begin on a multiple of 1024
};

// Calls load(stage address, step) for each of `steps` steps of 64 terms, STAGES - 1 steps ahead, and adds up the
// products of the tiles that it copied there: the left one, then the right one.
template <class T, class S, bool left_wide, bool right_wide, class Load>
__device__ __forceinline__ void multiply_steps(float (&sum)[S::N / 2], uint32_t shared, int steps, const Load& load) {
  const int group = threadIdx.x / 128;
  const int row = S::ROWS == 2 ? group * 64 : 0, column = S::ROWS == 2 ? 0 : group * S::N;
  constexpr int ahead = S::STAGES - 1;
#pragma unroll
  for (int step = 0; step < ahead; step++) {
    if (step < steps) load(shared + step * S::bytes, step);
    end_copies();
  }
  int stage = 0, next = ahead;  // next: where the step that is `ahead` goes, and the last step was
  for (int step = 0; step < steps; step++) {
    copies_arrived<ahead - 1>();
    __syncthreads();  // this step is there for all, and all are done with the last
    if (step + ahead < steps) load(shared + next * S::bytes, step + ahead);
    end_copies();
    const uint32_t left = shared + stage * S::bytes;
    multiply_mma<T, S::N, left_wide, right_wide>(sum, left, row, left + S::height * 128, column);
    stage = stage + 1 == S::STAGES ? 0 : stage + 1;
    next = next + 1 == S::STAGES ? 0 : next + 1;
  }
  __syncthreads();
}

// Has twice the threads where it was compiled for 9.0a: that is how the host learns whether wgmma is there, also where
// the driver compiled the kernels.
static __global__ void __launch_bounds__(COG_RWKV_WGMMA ? 64 : 32) has_wgmma_kernel() {}

}  // namespace cog_rwkv

// Products of tiles in shared memory on the tensor cores of any GPU from 8.0 on: what both kernels of conv2d for the
// half precisions share. The tiles are those of csrc/wgmma.cuh.
//
// The results of a warp are, of lane 4 g + t, rows g and g + 8 of 16, columns 2 t and 2 t + 1 of each 8.
#pragma once

#include "../csrc/mma16.cuh"
#include "../csrc/wgmma.cuh"

namespace cog_rwkv {

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

// ---- mma

// The address that a lane gives to ldmatrix for 16 rows from `row` on and 16 terms from `term` on. The four 8 x 8
// matrices come out as rows 0-7 terms 0-7, rows 8-15 terms 0-7, rows 0-7 terms 8-15, rows 8-15 terms 8-15.
template <bool wide>
__device__ __forceinline__ uint32_t matrices_at(uint32_t tile, int row, int term) {
  const int lane = threadIdx.x % 32, r = row + lane % 8 + lane / 8 % 2 * 8, t = term + lane / 16 * 8;
  if constexpr (!wide) return tile + swizzled(r, t / 8);
  const int r8 = row + lane / 8 % 2 * 8, term8 = term + lane / 16 * 8 + lane % 8;
  return tile + r8 / kLine * kBlockBytes + swizzled(term8, r8 % kLine / 8);
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

// ---- the loop over the terms

// How the 8 warps of a block share its tile: groups of four warps above each other (ROWS of them, 1 or 2) or side by
// side; each computes 64 rows and N columns. STAGES steps are in shared memory at once, so that BLOCKS blocks fit on a
// multiprocessor: while one waits for memory, the other multiplies.
template <int ROWS_, int N_, int STAGES_, int BLOCKS_>
struct Shape {
  static constexpr int ROWS = ROWS_, N = N_, STAGES = STAGES_, BLOCKS = BLOCKS_, threads = 256;
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

}  // namespace cog_rwkv

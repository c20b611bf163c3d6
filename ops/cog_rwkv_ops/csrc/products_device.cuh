// What the kernels of products.cuh share: copies into shared memory, the tensor cores that every GPU has, and the end
// of a product.
//
// For the tensor cores lane 4 g + q has, of 16 rows by 32 columns of a weight, columns 8 q to 8 q + 7 of the rows g and
// g + 8. Two instructions of 16 columns multiply them: the first takes the first four of the eight, the second the
// others. Which columns an instruction calls its 16 does not matter, as long as the activations come in the same order.
#pragma once

#include <type_traits>

#include "chain.cuh"
#include "math.h"
#include "products.cuh"
#include "products_plan.h"
#include "shared.cuh"

namespace cog_rwkv {

constexpr int kProductThreads = 32 * kProductWarps;

// The argument of a kernel.
struct ProductList {
  Product jobs[kMaxProducts];
  TeamShares shares;
  int count, n;
};

struct alignas(16) Piece {
  uint32_t words[4];  // 8 values
};

// 16 bytes of a weight into shared memory; zeros where `inside` is false, and then `from` is not read.
__device__ __forceinline__ void copy_piece(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_for_steps() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ Piece shared_piece(uint32_t from) {
  Piece p;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
               : "r"(from)
               : "memory");
  return p;
}

// What an earlier kernel wrote: from the cache that all multiprocessors share.
__device__ __forceinline__ Piece fresh_piece(const void* from) {
  Piece p;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
               : "l"(from)
               : "memory");
  return p;
}

// sums += 16 rows by 16 columns times 16 columns of 8 tokens. Lane 4 g + q has the sums of the rows g (two) and g + 8
// (two), of the tokens 2 q and 2 q + 1.
template <class T>
__device__ __forceinline__ void multiply_16(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The same for 32 columns: `low` is this lane's piece of row g of the weight, `high` of row g + 8, `x` of token g.
template <class T>
__device__ __forceinline__ void multiply_32(float (&sums)[4], const Piece& low, const Piece& high, const Piece& x) {
  multiply_16<T>(sums, low.words[0], high.words[0], low.words[1], high.words[1], x.words[0], x.words[1]);
  multiply_16<T>(sums, low.words[2], high.words[2], low.words[3], high.words[3], x.words[2], x.words[3]);
}

__device__ __forceinline__ float apply(Epilogue f, float x) {
  switch (f) {
    case Epilogue::tanh:
      return tanhf(x);
    case Epilogue::sigmoid:
      return sigmoid(x);
    case Epilogue::squared_relu:
      return x <= 0.0f ? 0.0f : x * x;  // NaN stays
    default:
      return x;
  }
}

// One row of a weight, for one token: bias, function, rounding.
template <class T>
__device__ __forceinline__ void finish_row(const Product& job, float sum, uint32_t row, int64_t token) {
  if (job.bias != nullptr) sum += job.bias[row];
  sum = apply(job.f, sum);
  const int64_t at = token * job.m + row;
  if (job.float_out) {
    static_cast<float*>(job.out)[at] = sum;
  } else {
    static_cast<T*>(job.out)[at] = static_cast<T>(sum);
  }
}

// Four rows of a weight, for one token. `row` is a multiple of 4.
template <class T>
__device__ __forceinline__ void finish_rows(const Product& job, const float4& sums, uint32_t row, int64_t token) {
  float y[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (job.bias != nullptr) y[i] += job.bias[row + i];
    y[i] = apply(job.f, y[i]);
  }
  const int64_t at = token * job.m + row;
  if (job.float_out) {
    store_vector(static_cast<float*>(job.out) + at, Vector<float, 4>{{y[0], y[1], y[2], y[3]}});
  } else {
    Vector<T, 4> out;
#pragma unroll
    for (int i = 0; i < 4; i++) out.values[i] = static_cast<T>(y[i]);
    store_vector(static_cast<T*>(job.out) + at, out);
  }
}

// The plans of a block for all jobs, in shared memory. `log_split(k)`: see WarpPlan; `most`: rows of a tile. All
// threads call it, and a barrier follows.
template <class LogSplit>
__device__ __forceinline__ void plan_jobs(WarpPlan (&plans)[kMaxProducts], const ProductList& list, uint32_t block,
                                          uint32_t most, const LogSplit& log_split) {
  const auto mine = static_cast<int>(threadIdx.x);
  if (mine >= list.count) return;
  uint32_t before = 0;
  for (int i = 0; i < mine; i++) {
    before += product_units(static_cast<uint32_t>(list.jobs[i].m), static_cast<uint32_t>(list.jobs[i].k));
  }
  const auto m = static_cast<uint32_t>(list.jobs[mine].m), k = static_cast<uint32_t>(list.jobs[mine].k);
  const RowRange rows = rows_of_team(m, k, before, list.shares.begin(block), list.shares.begin(block + 1));
  plans[mine] = plan_warps(rows, log_split(k), most);
}

}  // namespace cog_rwkv

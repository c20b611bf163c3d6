// The matrix products of a step, with 16-bit weights and activations and float32 sums: a group of products that do not
// depend on each other is one launch, balanced over the device.
//
// On Hopper products_wide.cuh computes them, whatever n is. Elsewhere, and with COG_RWKV_GPU=plain, products_stream.cu
// does up to n = 8, and cuBLAS what is beyond and what has transposed weights, one by one.
//
// A result is the same bytes every time. A row of it does not depend on what the other rows of the batch beside it
// hold. n may change its last bits, by the order of its sums: on Hopper through the plan (wide_plan.h), namely whether
// tiles have 64 rows, and how many slices there are; elsewhere not within 1..8.
//
// The kernels here follow each other by chain.cuh: they read weights before the kernel before them has ended, so
// weights must not be written on the stream just before.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"

namespace cog_rwkv {

enum class Epilogue { none, tanh, sigmoid, squared_relu };

struct Product {       // out[n][m] = f(sum_k x[n][k] weight[m][k] + bias[m])
  const void* x;       // [n, k] contiguous, on a 16-byte boundary, of the weight's type
  const void* weight;  // [m, k] float16 or bfloat16, contiguous, on a 16-byte boundary; k and m multiples of 32
  const float* bias;   // [m] or nullptr
  void* out;           // [n, m] on a 16-byte boundary: of x's type, or float32 where `float_out`
  int64_t m, k;
  Epilogue f;
  bool float_out;
  bool transposed = false;  // the weight is [k, m]; all of a group are, or none
  // More than 1: `out`, float32, has room for so many results, [slices, n, m], and the sums of its slices, added in
  // their order, are the result. For one product alone, without bias and function.
  int most_slices = 1;
};

constexpr int kMaxProducts = 8;

// All products of one group, n rows each; `type`: Half or BFloat16. On the current device. Returns the number of
// slices.
int products(const char* op, cudaStream_t stream, ScalarType type, const Product* jobs, int count, int64_t n);

constexpr int kMaxActiveRows = 16;  // the n of active_rows()
constexpr int kMaxSlices = 32;

// partial[s][n][c] = sum over the f of slice s of act[n][f] value_t[f][c], without reading rows of value_t that only
// zeros of `act` meet. Returns the number of slices, kMaxSlices at most; the reader adds them in their order. act [n,
// f] and value_t [f, c] are of `type`, contiguous, on 16-byte boundaries; f and c are multiples of 32; n is 16 at most.
int active_rows(const char* op, cudaStream_t stream, ScalarType type, const void* act, const void* value_t,
                float* partial, int64_t n, int64_t f, int64_t c);

}  // namespace cog_rwkv

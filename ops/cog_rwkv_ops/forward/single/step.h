// A step of one token in one kernel: what forward_ calls.
#pragma once

#include <cuda_runtime.h>

#include "../../csrc/model_weights.h"
#include "plan.h"

namespace cog_rwkv {

constexpr size_t kFixedBytes = 204 * 1024;  // of shared memory, in any case

// How a launch is cut.
struct SingleCut {
  unsigned blocks;
  size_t vector_bytes;  // of shared memory, for the vectors that a block multiplies
};

struct SingleStep {
  const Tensor &x, &shift, &wkv, &row, &logits;  // as forward_ has them, of one token
};

// Whether the kernel is for this device and model.
bool single_possible(const char* op, const ModelWeights& model, int64_t c);

void single_step(const char* op, cudaStream_t stream, const ModelWeights& model, const SingleStep& step);

void launch_single_half(const char* op, cudaStream_t stream, ScalarType state, const Single& p, const SingleCut& cut);
void launch_single_bfloat16(const char* op, cudaStream_t stream, ScalarType state, const Single& p,
                            const SingleCut& cut);

}  // namespace cog_rwkv

// The scans of decay_scan.h for long sequences: 16 tokens at a time by matrix products, and several parts of a sequence
// at the same time. See decay_blocks.cuh for the formulas.
#pragma once

#include "cuda.cuh"
#include "decay_scan_args.h"
#include "tensor.h"

namespace cog_rwkv {

constexpr int64_t kDecayChunksFrom = 64;  // tokens of a sequence

// Whether sequences of so many tokens are computed so: not where shared memory is too small for it, as for float32 on
// GPUs that have 99 KiB a block.
template <class T>
bool uses_chunks(const char* op, int64_t tokens);

// y and the last state. `like`: any float32 tensor of the device; `constant`: as in ScanKind.
template <class T>
void chunk_forward(const char* op, const Launch& launch, const Scan<T>& for_y, int64_t batch, bool constant,
                   const Tensor& like);

// The three scans of the backward, float32 throughout whatever T is.
template <class T>
void chunk_backward(const char* op, const Launch& launch, const Scan<T>& for_r, const Scan<T>& for_v,
                    const Scan<T>& for_k, int64_t batch, bool constant, const Tensor& like);

}  // namespace cog_rwkv

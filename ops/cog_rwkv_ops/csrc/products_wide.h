// The way of products() on Hopper, products_wide.cuh.
#pragma once

#include "products.cuh"

namespace cog_rwkv {

struct WideList;

// Whether the current device and these sizes are for wide_products().
bool wide_possible(const char* op, const Product* jobs, int count, int64_t n);

// `jobs`: checked, at least one, all transposed or none; n is at least 1. Returns the number of slices, as products().
int wide_products(const char* op, cudaStream_t stream, ScalarType type, const Product* jobs, int count, int64_t n);

// Launch what `list` says, on so many blocks at most: a type and file each, as there are many kernels.
void wide_launch_half(const char* op, cudaStream_t stream, const WideList& list, bool transposed,
                      uint32_t multiprocessors);
void wide_launch_bfloat16(const char* op, cudaStream_t stream, const WideList& list, bool transposed,
                          uint32_t multiprocessors);

}  // namespace cog_rwkv

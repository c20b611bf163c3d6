// The kernel of products() for few tokens where there is no Hopper; products.cu chooses.
#pragma once

#include "products_device.cuh"

namespace cog_rwkv {

// `units`: product_units() of all jobs together. `list`: jobs, count and n are set.
void stream_products(const char* op, cudaStream_t stream, ScalarType type, ProductList& list, uint64_t units,
                     int multiprocessors);
size_t stream_shared_bytes();

}  // namespace cog_rwkv

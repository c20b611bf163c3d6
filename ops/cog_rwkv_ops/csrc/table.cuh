// Rows of a table in pinned host memory, copied by the GPU itself: each thread moves 16 bytes over the bus, so a row
// costs no call, no staging buffer and no wait of the host. A table on the device is read and written in the same way.
#pragma once

#include <cstring>

#include "cuda.cuh"
#include "table.h"

namespace cog_rwkv {

// The address under which the device of `ids` sees the memory of `table`.
inline char* table_on_device(const char* op, const Tensor& table, const Table& layout, const Tensor& ids) {
  auto* start = static_cast<char*>(table.data_ptr());
  if (table.is_cuda()) {
    check_device(op, "ids", ids, "table", table);
    return start;
  }
  if (!table.is_cpu()) fail(op, "table is on another device; it must be in pinned host memory");
  if (layout.rows == 0 || layout.row_bytes == 0) return start;
  cudaPointerAttributes first{}, last{};
  check_cuda(op, cudaPointerGetAttributes(&first, start));
  check_cuda(op,
             cudaPointerGetAttributes(&last, start + (layout.rows - 1) * layout.stride_bytes + layout.row_bytes - 1));
  if (first.type != cudaMemoryTypeHost || last.type != cudaMemoryTypeHost || first.devicePointer == nullptr) {
    fail(op, "table is in pageable host memory; it must be pinned, as table.pin_memory() is");
  }
  return static_cast<char*>(first.devicePointer);
}

// NaN of the dtype, as often as fits into V.
template <class V>
V nan_pattern(ScalarType type) {
  const uint64_t one = type == ScalarType::Double  ? 0x7ff8000000000000
                       : type == ScalarType::Float ? 0x7fc000007fc00000
                       : type == ScalarType::Half  ? 0x7e007e007e007e00
                                                   : 0x7fc07fc07fc07fc0;
  const uint64_t two[2] = {one, one};
  V pattern;
  std::memcpy(&pattern, two, sizeof(V));
  return pattern;
}

// Calls f(V{}) with the widest type of 2 to 16 bytes at which both addresses, rows and strides are aligned.
template <class F>
void dispatch_width(uint64_t bits, F&& f) {
  if (bits % 16 == 0) return f(uint4{});
  if (bits % 8 == 0) return f(uint2{});
  if (bits % 4 == 0) return f(uint32_t{});
  f(uint16_t{});
}

inline uint64_t alignment_bits(const Table& layout, const void* a, const void* b) {
  return reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uint64_t>(layout.row_bytes) |
         static_cast<uint64_t>(layout.stride_bytes);
}

}  // namespace cog_rwkv

// Tables of rows in host memory, read or written by row: what `host_gather` and `host_scatter_` share.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace cog_rwkv {

// A table [R, ...] whose rows lie anywhere, each contiguous.
struct Table {
  int64_t rows, row_bytes, stride_bytes;
};

inline int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

inline Table check_table(const char* op, const Tensor& table) {
  check_floating(op, "table", table);
  if (table.dim() == 0) fail(op, "table has shape []; it must be [R, ...]");
  int64_t expected = 1;
  for (int64_t d = table.dim() - 1; d > 0; d--) {
    if (table.size(d) != 1 && table.stride(d) != expected) fail(op, "table must have contiguous rows");
    expected *= table.size(d);
  }
  const int64_t bytes = element_bytes(table.scalar_type());
  return {table.size(0), expected * bytes, table.stride(0) * bytes};
}

inline void check_ids(const char* op, const Tensor& ids) {
  check_dtype(op, "ids", ids, {ScalarType::Long});
  check_dim(op, "ids", ids, 1, "[N]");
}

// What only the CPU can look at: the values.
inline void check_id_values(const char* op, const int64_t* ids, int64_t n, int64_t rows) {
  for (int64_t i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= rows) {
      fail(op, "ids has " + std::to_string(ids[i]) + "; table has the rows 0 to " + std::to_string(rows - 1));
    }
  }
}

// Uninitialised and contiguous, in the dtype of `table` and on the device of `like`. (The C function behind
// torch::stable::new_empty: that one looks the operator up by its name at every call, which takes longer than a
// gather.)
inline Tensor empty_rows(const Tensor& table, const Tensor& like, const std::vector<int64_t>& sizes) {
  AtenTensorHandle result = nullptr;
  int32_t dtype = dtype_number(table);
  const auto count = static_cast<int64_t>(sizes.size());
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_aten_new_empty(like.get(), sizes.data(), count, &dtype, nullptr, nullptr, 0, nullptr, &result));
  return Tensor(result);
}

// [n, ...] with the rows of `table`.
inline std::vector<int64_t> sizes_of_rows(const Tensor& table, int64_t n) {
  std::vector<int64_t> sizes{n};
  for (int64_t d = 1; d < table.dim(); d++) sizes.push_back(table.size(d));
  return sizes;
}

}  // namespace cog_rwkv

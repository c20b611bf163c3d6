// host_scatter_: the checks of its arguments, the same on every device.
#pragma once

#include "../csrc/table.h"

namespace cog_rwkv {

inline Table check_host_scatter(const Tensor& table, const Tensor& ids, const Tensor& values) {
  constexpr const char* op = "host_scatter_";
  const Table layout = check_table(op, table);
  if (layout.rows > 1 && layout.stride_bytes < layout.row_bytes) {
    fail(op, "table must not overlap itself: it is written in place");
  }
  check_ids(op, ids);
  check_same_dtype(op, "values", values, "table", table);
  check_device(op, "values", values, "ids", ids);
  bool same = values.dim() == table.dim() && values.size(0) == ids.size(0);
  for (int64_t d = 1; same && d < table.dim(); d++) same = values.size(d) == table.size(d);
  if (!same) {
    fail(op, "values has shape " + shape_text(values) + "; it must be [N, ...] with N as in ids, " + shape_text(ids) +
                 ", and the rows of table, " + shape_text(table));
  }
  return layout;
}

}  // namespace cog_rwkv

// host_scatter_: schema and CPU kernel.
#include "host_scatter.h"

#include <algorithm>
#include <cstring>

#include "../csrc/cpu.h"
#include "../csrc/dtype.h"

namespace cog_rwkv {
namespace {

// Two threads may not write one row, and which of its values it got would depend on them.
void check_ids_differ(const int64_t* ids, int64_t n) {
  std::vector<int64_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    fail("host_scatter_", "ids has " + std::to_string(*twice) + " twice; each must be another row");
  }
}

void host_scatter_cpu(const Tensor& table, const Tensor& ids, const Tensor& values) {
  const Table layout = check_host_scatter(table, ids, values);
  check_device("host_scatter_", "table", table, "ids", ids);
  const Tensor index = as_contiguous(ids), given = as_contiguous(values);
  const int64_t n = ids.size(0), bytes = layout.row_bytes;
  const auto* id = data<int64_t>(index);
  check_id_values("host_scatter_", id, n, layout.rows);
  check_ids_differ(id, n);
  if (n * bytes == 0) return;
  auto* to = static_cast<char*>(table.mutable_data_ptr());
  const auto* from = static_cast<const char*>(given.const_data_ptr());
  parallel_for(n, 1 + 65536 / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) std::memcpy(to + id[i] * layout.stride_bytes, from + i * bytes, bytes);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("host_scatter_(Tensor(a!) table, Tensor ids, Tensor values) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("host_scatter_", TORCH_BOX(&host_scatter_cpu)); }

}  // namespace cog_rwkv

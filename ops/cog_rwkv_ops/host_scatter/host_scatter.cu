// host_scatter_: CUDA kernel and launch.
#include "host_scatter.h"

#include "../csrc/order.h"
#include "../csrc/table.cuh"

namespace cog_rwkv {
namespace {

// Row ids[i] of `table`, where there is one, becomes row i of `values`, `width` values of V long; in the order of
// `places`, where there is one.
template <class V>
__global__ void __launch_bounds__(256)
    scatter_kernel(V* __restrict__ table, int64_t stride, int64_t rows, const int64_t* __restrict__ ids,
                   const uint32_t* __restrict__ places, const V* __restrict__ values, int64_t total, int64_t width) {
  const int64_t step = gridDim.x * int64_t{256};
  for (int64_t v = blockIdx.x * int64_t{256} + threadIdx.x; v < total; v += step) {
    const int64_t turn = v / width, c = v - turn * width, i = places ? places[turn] : turn, id = ids[i];
    if (id >= 0 && id < rows) table[id * stride + c] = values[i * width + c];
  }
}

void host_scatter_cuda(const Tensor& table, const Tensor& ids, const Tensor& values) {
  const Table layout = check_host_scatter(table, ids, values);
  if (!ids.is_cuda()) check_device("host_scatter_", "ids", ids, "table", table);
  const Launch launch("host_scatter_", ids);
  char* to = table_on_device("host_scatter_", table, layout, ids);
  const Tensor index = as_contiguous(ids), given = as_contiguous(values);
  const int64_t n = ids.size(0);
  if (n * layout.row_bytes == 0) return;
  const RowOrder order("host_scatter_", launch, layout, index, table.is_cpu());
  dispatch_width(alignment_bits(layout, to, given.const_data_ptr()), [&](auto unit) {
    using V = decltype(unit);
    const int64_t width = layout.row_bytes / sizeof(V), total = n * width;
    scatter_kernel<V><<<blocks(total, 256), 256, 0, launch.stream>>>(
        reinterpret_cast<V*>(to), layout.stride_bytes / static_cast<int64_t>(sizeof(V)), layout.rows,
        data<int64_t>(index), order.places(), static_cast<const V*>(given.const_data_ptr()), total, width);
    launch.check();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("host_scatter_", TORCH_BOX(&host_scatter_cuda)); }

}  // namespace cog_rwkv

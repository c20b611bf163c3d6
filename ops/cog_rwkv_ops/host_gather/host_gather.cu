// host_gather and its backward: CUDA kernels and launches.
#include "host_gather.h"

#include "../csrc/order.h"
#include "../csrc/table.cuh"

namespace cog_rwkv {
namespace {

// Row i of `out`, `width` values of V long, is row ids[i] of `table`, or `missing` where there is none; in the order of
// `places`, where there is one.
template <class V>
__global__ void __launch_bounds__(256)
    gather_kernel(const V* __restrict__ table, int64_t stride, int64_t rows, const int64_t* __restrict__ ids,
                  const uint32_t* __restrict__ places, V* __restrict__ out, int64_t total, int64_t width, V missing) {
  const int64_t step = gridDim.x * int64_t{256};
  for (int64_t v = blockIdx.x * int64_t{256} + threadIdx.x; v < total; v += step) {
    const int64_t turn = v / width, c = v - turn * width, i = places ? places[turn] : turn, id = ids[i];
    out[i * width + c] = id >= 0 && id < rows ? table[id * stride + c] : missing;
  }
}

Tensor host_gather_cuda(const Tensor& table, const Tensor& ids) {
  const Table layout = check_table("host_gather", table);
  check_ids("host_gather", ids);
  if (!ids.is_cuda()) check_device("host_gather", "ids", ids, "table", table);
  const Launch launch("host_gather", ids);
  const char* from = table_on_device("host_gather", table, layout, ids);
  const Tensor index = as_contiguous(ids);
  const int64_t n = ids.size(0);
  Tensor out = empty_rows(table, index, sizes_of_rows(table, n));
  if (n * layout.row_bytes == 0) return out;
  const RowOrder order("host_gather", launch, layout, index, table.is_cpu());
  dispatch_width(alignment_bits(layout, from, out.const_data_ptr()), [&](auto unit) {
    using V = decltype(unit);
    const int64_t width = layout.row_bytes / sizeof(V), total = n * width;
    gather_kernel<V><<<blocks(total, 256), 256, 0, launch.stream>>>(
        reinterpret_cast<const V*>(from), layout.stride_bytes / static_cast<int64_t>(sizeof(V)), layout.rows,
        data<int64_t>(index), order.places(), static_cast<V*>(out.mutable_data_ptr()), total, width,
        nan_pattern<V>(table.scalar_type()));
    launch.check();
  });
  return out;
}

// out[sorted[i]] += gradient[order[i]], in the order of i: the block of the first of a run of equal ids adds it all.
template <class T>
__global__ void __launch_bounds__(256)
    add_rows_kernel(T* __restrict__ out, int64_t rows, const T* __restrict__ gradient,
                    const int64_t* __restrict__ sorted, const int64_t* __restrict__ order, int64_t n, int64_t size) {
  using A = arithmetic_t<T>;
  for (int64_t first = blockIdx.x; first < n; first += gridDim.x) {
    const int64_t id = sorted[first];
    if (id < 0 || id >= rows || (first > 0 && sorted[first - 1] == id)) continue;
    for (int64_t c = threadIdx.x; c < size; c += 256) {
      A sum = 0;
      for (int64_t i = first; i < n && sorted[i] == id; i++) {
        const int64_t place = order[i];
        if (place >= 0 && place < n) sum += static_cast<A>(gradient[place * size + c]);
      }
      out[id * size + c] = static_cast<T>(sum);
    }
  }
}

Tensor host_gather_backward_cuda(const Tensor& gradient, const Tensor& sorted, const Tensor& order, int64_t rows,
                                 bool on_host) {
  constexpr const char* op = "host_gather_backward";
  check_host_gather_backward(gradient, sorted, order, rows);
  const Launch launch(op, gradient);
  const Tensor given = as_contiguous(gradient), ids = as_contiguous(sorted), places = as_contiguous(order);
  const std::vector<int64_t> sizes = sizes_of_rows(gradient, rows);
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  Tensor out = on_host ? torch::stable::new_zeros(given, sizes, std::nullopt, std::nullopt, cpu, true)
                       : torch::stable::new_zeros(given, sizes);
  if (gradient.numel() == 0 || rows == 0) return out;
  char* to = table_on_device(op, out, check_table(op, out), ids);
  const int64_t n = gradient.size(0);
  dispatch_floating(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    add_rows_kernel<T><<<blocks(n, 1), 256, 0, launch.stream>>>(reinterpret_cast<T*>(to), rows, data<T>(given),
                                                                data<int64_t>(ids), data<int64_t>(places), n,
                                                                gradient.numel() / n);
    launch.check();
  });
  // The caller reads a host tensor without waiting for any stream.
  if (on_host) check_cuda(op, cudaStreamSynchronize(launch.stream));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("host_gather", TORCH_BOX(&host_gather_cuda));
  m.impl("host_gather_backward", TORCH_BOX(&host_gather_backward_cuda));
}

}  // namespace cog_rwkv

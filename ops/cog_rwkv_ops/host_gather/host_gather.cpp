// host_gather and its backward: schemas and CPU kernels.
#include "host_gather.h"

#include <cstring>

#include "../csrc/cpu.h"
#include "../csrc/dtype.h"

namespace cog_rwkv {
namespace {

constexpr int64_t kAhead = 16;  // rows that memory is asked for ahead: one after the other they take twice as long

Tensor host_gather_cpu(const Tensor& table, const Tensor& ids) {
  const Table layout = check_table("host_gather", table);
  check_ids("host_gather", ids);
  const Tensor index = as_contiguous(ids);
  const int64_t n = ids.size(0), bytes = layout.row_bytes;
  const auto* id = data<int64_t>(index);
  check_id_values("host_gather", id, n, layout.rows);
  Tensor out = empty_tensor(table, sizes_of_rows(table, n));
  if (n * bytes == 0) return out;
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(n, 1 + 65536 / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (i + kAhead < end) __builtin_prefetch(from + id[i + kAhead] * layout.stride_bytes);
      std::memcpy(to + i * bytes, from + id[i] * layout.stride_bytes, bytes);
    }
  });
  return out;
}

// out[sorted[i]] += gradient[order[i]], in the order of i.
template <class T>
void add_rows(T* out, const T* gradient, const int64_t* sorted, const int64_t* order, int64_t n, int64_t size) {
  using A = arithmetic_t<T>;
  parallel_for(n, 1 + 16384 / size, [&](int64_t begin, int64_t end) {
    std::vector<A> sum(size);
    for (int64_t first = begin; first < end; first++) {
      if (first > 0 && sorted[first] == sorted[first - 1]) continue;  // whoever has the first of a run adds it all
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t i = first; i < n && sorted[i] == sorted[first]; i++) {
        const T* row = gradient + order[i] * size;
        for (int64_t c = 0; c < size; c++) sum[c] += static_cast<A>(row[c]);
      }
      for (int64_t c = 0; c < size; c++) out[sorted[first] * size + c] = static_cast<T>(sum[c]);
    }
  });
}

Tensor host_gather_backward_cpu(const Tensor& gradient, const Tensor& sorted, const Tensor& order, int64_t rows, bool) {
  check_host_gather_backward(gradient, sorted, order, rows);
  const Tensor given = as_contiguous(gradient), ids = as_contiguous(sorted), places = as_contiguous(order);
  const int64_t n = gradient.size(0);
  check_id_values("host_gather_backward", data<int64_t>(ids), n, rows);
  check_id_values("host_gather_backward", data<int64_t>(places), n, n);
  Tensor out = torch::stable::new_zeros(gradient, sizes_of_rows(gradient, rows));
  if (gradient.numel() == 0) return out;
  dispatch_floating(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    add_rows(mutable_data<T>(out), data<T>(given), data<int64_t>(ids), data<int64_t>(places), n, gradient.numel() / n);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("host_gather(Tensor table, Tensor ids) -> Tensor");
  m.def("host_gather_backward(Tensor gradient, Tensor sorted, Tensor order, SymInt rows, bool on_host) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("host_gather", TORCH_BOX(&host_gather_cpu));
  m.impl("host_gather_backward", TORCH_BOX(&host_gather_backward_cpu));
}

}  // namespace cog_rwkv

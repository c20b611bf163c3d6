// products_ and active_rows_: the kernels of csrc/products.cuh as operators.
#include "../csrc/products.cuh"

#include "../csrc/chain.cuh"
#include "../csrc/tensor.h"
#include "products.h"

namespace cog_rwkv {
namespace {

void products_cuda(const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
                   const std::vector<std::optional<Tensor>>& biases, const std::vector<int64_t>& activations,
                   const std::vector<Tensor>& out) {
  check_products({x, weights, biases, activations, out});
  const Launch launch("products_", x[0]);
  std::vector<Product> jobs;
  for (size_t i = 0; i < x.size(); i++) {
    jobs.push_back({x[i].const_data_ptr(), weights[i].const_data_ptr(), biases[i] ? data<float>(*biases[i]) : nullptr,
                    out[i].mutable_data_ptr(), weights[i].size(0), weights[i].size(1),
                    static_cast<Epilogue>(activations[i]), out[i].scalar_type() == ScalarType::Float,
                    is_transposed(weights[i])});
  }
  const auto count = static_cast<int>(jobs.size());
  products("products_", launch.stream, x[0].scalar_type(), jobs.data(), count, x[0].size(0));
}

// out[i] = the sum of partial[s][i] over the slices, in their order.
__global__ void __launch_bounds__(256) add_slices_kernel(const float* partial, int slices, int64_t size, float* out) {
  wait_for_previous();
  let_next_begin();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += step) {
    float sum = partial[i];
    for (int s = 1; s < slices; s++) sum += partial[s * size + i];
    out[i] = sum;
  }
}

void active_rows_cuda(const Tensor& act, const Tensor& value_t, const Tensor& out) {
  constexpr const char* op = "active_rows_";
  check_active_rows(act, value_t, out);
  const Launch launch(op, act);
  const int64_t n = act.size(0), f = act.size(1), c = value_t.size(1);
  const Tensor partial = torch::stable::new_empty(act, {kMaxSlices, n, c}, ScalarType::Float);
  const int slices = active_rows(op, launch.stream, act.scalar_type(), act.const_data_ptr(), value_t.const_data_ptr(),
                                 mutable_data<float>(partial), n, f, c);
  launch_chained(op, launch.stream, add_slices_kernel, dim3(blocks(n * c, 256)), dim3(256), 0, data<float>(partial),
                 slices, n * c, mutable_data<float>(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("products_", TORCH_BOX(&products_cuda));
  m.impl("active_rows_", TORCH_BOX(&active_rows_cuda));
}

}  // namespace cog_rwkv

// products(): the checks, and which kernel computes a group.
#include "products.cuh"

#include <torch/csrc/stable/ops.h>

#include <array>

#include "aligned.cuh"
#include "products_kernels.cuh"
#include "products_wide.h"
#include "tensor.h"

namespace cog_rwkv {
namespace {

// ---- what is to be tuned

constexpr int64_t kStreamRows = 8;  // the limit of products_stream.cu

enum class Way { stream, wide, library };

Way way_for(const char* op, const Product* jobs, int count, int64_t n) {
  if (wide_possible(op, jobs, count, n)) return Way::wide;
  const auto room = static_cast<size_t>(device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  if (!jobs[0].transposed && n <= kStreamRows && stream_shared_bytes() <= room) return Way::stream;
  return Way::library;
}

// ---- checks

void check_product(const char* op, int index, const Product& job) {
  const auto refuse = [&](const std::string& why) { fail(op, "product " + std::to_string(index) + ": " + why); };
  constexpr int64_t most = 1 << 30;
  if (job.k < 32 || job.k % 32 != 0 || job.m < 32 || job.m % 32 != 0 || job.k > most || job.m > most) {
    refuse("the weight has shape [" + std::to_string(job.m) + ", " + std::to_string(job.k) +
           "]; both must be multiples of 32");
  }
  if (!aligned16(job.x)) refuse("x must lie on a 16-byte boundary");
  if (!aligned16(job.weight)) refuse("the weight must lie on a 16-byte boundary");
  if (!aligned16(job.out)) refuse("out must lie on a 16-byte boundary");
}

uint64_t check_products(const char* op, ScalarType type, const Product* jobs, int count) {
  if (type != ScalarType::Half && type != ScalarType::BFloat16) fail(op, "weights must be float16 or bfloat16");
  if (count < 0 || count > kMaxProducts) {
    fail(op, std::to_string(count) + " products in a group; " + std::to_string(kMaxProducts) + " at most");
  }
  uint64_t units = 0;
  for (int i = 0; i < count; i++) {
    check_product(op, i, jobs[i]);
    if (jobs[i].transposed != jobs[0].transposed) fail(op, "some weights of the group are transposed, others are not");
    if (jobs[i].most_slices > 1 && (count > 1 || !jobs[i].float_out || jobs[i].bias || jobs[i].f != Epilogue::none)) {
      fail(op, "only a product alone, of float32, without bias and function, can be left in slices");
    }
    units += static_cast<uint64_t>(jobs[i].m / kRowsAtOnce) * (jobs[i].k / kChunk);
  }
  if (units >= uint64_t{1} << 31) fail(op, "the weights of a group have 2^38 values or more");
  return units;
}

// ---- cuBLAS, where there is no Hopper

// out = f(sums + bias); `sums` may be `out`. One thread four values of a row.
template <class T, class S>
__global__ void __launch_bounds__(256) finish_kernel(const S* sums, Product job, int64_t n) {
  wait_for_previous();
  let_next_begin();
  const int64_t quads = n * job.m / 4, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < quads; i += step) {
    const Vector<S, 4> v = load_vector<S, 4>(sums + i * 4);
    const int64_t token = i * 4 / job.m;
    const float4 four = make_float4(v.values[0], v.values[1], v.values[2], v.values[3]);
    finish_rows<T>(job, four, static_cast<uint32_t>(i * 4 - token * job.m), token);
  }
}

// A matrix of [rows, columns] at `data`, as a tensor that does not own it.
Tensor tensor_at(const char* op, const void* data, int64_t rows, int64_t columns, ScalarType type, bool transposed) {
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  const std::array<int64_t, 2> size = transposed ? std::array{columns, rows} : std::array{rows, columns};
  const std::array<int64_t, 2> strides = transposed ? std::array{int64_t{1}, columns} : std::array{columns, int64_t{1}};
  const torch::stable::Device where(torch::headeronly::DeviceType::CUDA, device);
  return torch::stable::from_blob(const_cast<void*>(data), {size.data(), 2}, {strides.data(), 2}, where, type);
}

// out = x weight^T, where `out` has the type of both, or float32.
void library_product(const Tensor& x, const Tensor& weight_t, const Tensor& out, bool float_out) {
  using torch::stable::detail::from;
  if (!float_out) {
    std::array<StableIValue, 3> stack{from(x), from(weight_t), from(out)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
    (void)torch::stable::detail::to<Tensor>(stack[0]);
    return;
  }
  std::array<StableIValue, 4> stack{from(x), from(weight_t), from(ScalarType::Float), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

template <class T, class S>
void launch_finish(const char* op, cudaStream_t stream, const Tensor& sums, const Product& job, int64_t n) {
  const dim3 grid(blocks(n * job.m / 4, 256));
  launch_chained(op, stream, finish_kernel<T, S>, grid, dim3(256), 0, data<S>(sums), job, n);
}

template <class T>
void library_product_of(const char* op, cudaStream_t stream, ScalarType type, const Product& job, int64_t n) {
  const bool plain = job.f == Epilogue::none && job.bias == nullptr;
  // The widest result of a step, a channel mix's keys, is rounded where it lies before it is squared: as much of the
  // time of a long prompt as it would take in float32 is not worth half a bit.
  const bool rounded = !job.float_out && (plain || (job.f == Epilogue::squared_relu && job.bias == nullptr));
  const Tensor x = tensor_at(op, job.x, n, job.k, type, false);
  const Tensor weight_t = job.transposed ? tensor_at(op, job.weight, job.k, job.m, type, false)
                                         : tensor_at(op, job.weight, job.m, job.k, type, true);
  const Tensor sums = rounded         ? tensor_at(op, job.out, n, job.m, type, false)
                      : job.float_out ? tensor_at(op, job.out, n, job.m, ScalarType::Float, false)
                                      : torch::stable::new_empty(x, {n, job.m}, ScalarType::Float);
  library_product(x, weight_t, sums, !rounded);
  if (plain) return;
  if (rounded) return launch_finish<T, T>(op, stream, sums, job, n);
  launch_finish<T, float>(op, stream, sums, job, n);
}

void library_products(const char* op, cudaStream_t stream, ScalarType type, const Product& job, int64_t n) {
  if (type == ScalarType::Half) return library_product_of<Half>(op, stream, type, job, n);
  library_product_of<BFloat16>(op, stream, type, job, n);
}

}  // namespace

int products(const char* op, cudaStream_t stream, ScalarType type, const Product* jobs, int count, int64_t n) {
  const uint64_t units = check_products(op, type, jobs, count);
  if (n == 0 || count == 0) return 1;
  const Way way = way_for(op, jobs, count, n);
  if (way == Way::wide) return wide_products(op, stream, type, jobs, count, n);
  if (way == Way::library) {
    for (int i = 0; i < count; i++) library_products(op, stream, type, jobs[i], n);
    return 1;
  }
  ProductList list{};
  std::copy_n(jobs, count, list.jobs);
  list.count = count;
  list.n = static_cast<int>(n);
  stream_products(op, stream, type, list, units, device_attribute(op, cudaDevAttrMultiProcessorCount));
  return 1;
}

}  // namespace cog_rwkv

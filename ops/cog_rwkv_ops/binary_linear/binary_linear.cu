// binary_linear, binary_linear_packed and pack_signs: CUDA kernels and launches.
//
// Few rows of x: one launch. Each block packs x for itself into shared memory while its rows of the weight are on their
// way from memory; a warp takes some rows of the weight and counts with xor and popc. Where kernels overlap
// (csrc/chain.cuh), those rows are on their way into L2 while the kernel ahead still runs: it may well have written
// them, so they are read only after it. Popcounts come at 16 a cycle and multiprocessor, so for many rows the tensor
// cores are faster: the signs become bytes, and the sums are int32.
#include "binary_linear.h"

#include <array>
#include <tuple>

#include "../csrc/chain.cuh"
#include "../csrc/reduce.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int64_t kMostRows = 32;            // of x, for popcounts
constexpr int64_t kSharedBytes = 48 * 1024;  // of the packed rows of x of a block

// The signs of the values at begin to begin + 7 of a row of k; `whole` where 8 values can be loaded at once.
template <class T>
__device__ __forceinline__ uint32_t sign_byte(const T* row, int64_t begin, int64_t k, bool whole) {
  uint32_t byte = 0;
  if (whole && begin + 8 <= k) {
    const Vector<T, 8> v = load_vector<T, 8>(row + begin);
#pragma unroll
    for (int i = 0; i < 8; i++) byte |= uint32_t{static_cast<float>(v.values[i]) >= 0.0f} << i;
    return byte;
  }
#pragma unroll 1
  for (int i = 0; i < 8 && begin + i < k; i++) byte |= uint32_t{static_cast<float>(row[begin + i]) >= 0.0f} << i;
  return byte;
}

// A block a row: its signs, and the mean of its magnitudes.
template <class T>
__global__ void __launch_bounds__(256) pack_kernel(const T* __restrict__ weight, int64_t m, int64_t k, bool whole,
                                                   uint8_t* __restrict__ signs, float* __restrict__ scale) {
  __shared__ float shared[32];
  const int64_t bytes = 4 * sign_words(k);
  for (int64_t r = blockIdx.x; r < m; r += gridDim.x) {
    const T* row = weight + r * k;
    float sum = 0.0f;
    for (int64_t b = threadIdx.x; b < bytes; b += 256) {
      signs[r * bytes + b] = static_cast<uint8_t>(sign_byte(row, 8 * b, k, whole));
      for (int64_t i = 8 * b; i < min(8 * b + 8, k); i++) sum += fabsf(static_cast<float>(row[i]));
    }
    sum = reduce_block(sum, Add{}, shared);
    if (threadIdx.x == 0) scale[r] = k == 0 ? 0.0f : sum / static_cast<float>(k);
  }
}

__device__ __forceinline__ int differing(uint4 a, uint4 b) {
  return __popc(a.x ^ b.x) + __popc(a.y ^ b.y) + __popc(a.z ^ b.z) + __popc(a.w ^ b.w);
}

template <class T>
struct CountArgs {
  const T* x;          // [n, k]
  const uint4* signs;  // [m, groups]
  const float* scale;  // [m]
  T* out;              // [n, m]
  int64_t n, k, m, groups;
  bool whole;  // rows of x can be loaded 8 values at once
};

// Groups `lane` + 32 i of kColumns rows of the weight, beginning with `column`; the last one again behind the end.
template <int kColumns>
__device__ __forceinline__ void load_groups(uint4 (&w)[kColumns], const uint4* signs, int64_t column, int64_t m,
                                            int64_t groups, int g) {
#pragma unroll
  for (int c = 0; c < kColumns; c++) w[c] = signs[min(column + c, m - 1) * groups + g];
}

// Brings `rows` rows of the weight, from `first` on, into L2.
template <class T>
__device__ __forceinline__ void prefetch_rows(const CountArgs<T>& p, int64_t first, int64_t rows) {
  const int64_t count = min(rows, p.m - first) * p.groups;
  constexpr int kLine = 128 / sizeof(uint4);
  for (int64_t i = threadIdx.x * kLine; i < count; i += kThreads * kLine) {
    prefetch_l2(p.signs + first * p.groups + i);
  }
}

// kRows rows of x (blockIdx.y says which) times all rows of the weight, kColumns at a time a warp.
template <class T, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreads, kRows == 1 ? 2 : 1) count_kernel(CountArgs<T> p) {
  extern __shared__ uint4 packed[];  // [kRows, groups]
  constexpr int kAhead = 2;          // groups a lane that are asked for before x is packed
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t step = gridDim.x * int64_t{kWarps * kColumns};
  const int64_t column0 = (blockIdx.x * int64_t{kWarps} + warp) * kColumns, row0 = blockIdx.y * int64_t{kRows};
  prefetch_rows(p, blockIdx.x * int64_t{kWarps * kColumns}, kWarps * kColumns);
  wait_for_previous();
  let_next_begin();
  uint4 ahead[kAhead][kColumns] = {};
  float scale = 0.0f;  // of column + lane
  if (column0 < p.m) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (lane + 32 * i < p.groups) load_groups(ahead[i], p.signs, column0, p.m, p.groups, lane + 32 * i);
    }
    scale = p.scale[min(column0 + lane % kColumns, p.m - 1)];
  }
  const int groups = static_cast<int>(p.groups), bytes = groups * 16;  // a row has kSharedBytes at most
#pragma unroll 1
  for (int r = 0; r < kRows; r++) {
    const T* row = p.x + (row0 + r) * p.k;
#pragma unroll 1
    for (int b = threadIdx.x; b < bytes; b += kThreads) {
      const uint32_t byte = row0 + r < p.n ? sign_byte(row, int64_t{8} * b, p.k, p.whole) : 0;
      reinterpret_cast<uint8_t*>(packed)[r * bytes + b] = static_cast<uint8_t>(byte);
    }
  }
  __syncthreads();
  const auto count_columns = [&](int64_t column, auto first) {
    int count[kColumns][kRows] = {};
    const auto add = [&](const uint4(&w)[kColumns], int g) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const uint4 x = packed[r * groups + g];
#pragma unroll
        for (int c = 0; c < kColumns; c++) count[c][r] += differing(w[c], x);
      }
    };
    int g = lane;
    if constexpr (first.value) {
#pragma unroll
      for (int i = 0; i < kAhead; i++, g += 32) {
        if (g < groups) add(ahead[i], g);
      }
    } else {
      scale = p.scale[min(column + lane % kColumns, p.m - 1)];
    }
#pragma unroll(kColumns < 4 ? 2 : 1)
    for (; g < groups; g += 32) {
      uint4 w[kColumns];
      load_groups(w, p.signs, column, p.m, p.groups, g);
      add(w, g);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const float factor = __shfl_sync(kAllLanes, scale, c);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int total = __reduce_add_sync(kAllLanes, count[c][r]);
        if (lane == (c * kRows + r) % 32 && column + c < p.m && row0 + r < p.n) {
          const float sum = static_cast<float>(p.k - 2 * int64_t{total});
          p.out[(row0 + r) * p.m + column + c] = static_cast<T>(sum * factor);
        }
      }
    }
  };
  if (column0 < p.m) count_columns(column0, std::true_type{});
#pragma unroll 1
  for (int64_t column = column0 + step; column < p.m; column += step) count_columns(column, std::false_type{});
}

template <class T, int kRows, int kColumns>
void count(const Launch& launch, const CountArgs<T>& p) {
  const dim3 grid(blocks(p.m, kWarps * kColumns), static_cast<unsigned>((p.n + kRows - 1) / kRows));
  const int64_t shared = kRows * p.groups * 16;
  launch_chained("binary_linear", launch.stream, count_kernel<T, kRows, kColumns>, grid, dim3(kThreads), shared, p);
}

// Rows of bytes, each 1 or -1 for a sign, `padded` long: zeros behind k, and in rows behind `rows`. 8 bytes a thread.
template <class Byte>
__global__ void __launch_bounds__(256) spread_kernel(Byte sign_byte_at, int64_t rows, int64_t all_rows, int64_t k,
                                                     int64_t padded, uint2* __restrict__ out) {
  const int64_t step = gridDim.x * int64_t{256}, width = padded / 8, total = all_rows * width;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < total; i += step) {
    const int64_t r = i / width, b = i - r * width;
    const uint32_t bits = r < rows ? sign_byte_at(r, b) : 0;
    // Four bits, each to a byte of its own; then 1 to 1 and 0 to -1.
    uint32_t half[2] = {(bits & 15) * 0x00204081 & 0x01010101, (bits >> 4 & 15) * 0x00204081 & 0x01010101};
    half[0] = ~(half[0] * 0xfe);
    half[1] = ~(half[1] * 0xfe);
    const int64_t there = r < rows ? k - 8 * b : 0;  // values that are left: zeros stand behind them
    if (there < 8) {
      half[0] = there >= 4 ? half[0] : there > 0 ? half[0] & ((1u << 8 * there) - 1) : 0;
      half[1] = there > 4 ? half[1] & ((1u << 8 * (there - 4)) - 1) : 0;
    }
    out[i] = {half[0], half[1]};
  }
}

template <class T>
struct ByteOfValues {
  const T* values;
  int64_t k;
  bool whole;
  __device__ uint32_t operator()(int64_t r, int64_t b) const { return sign_byte(values + r * k, 8 * b, k, whole); }
};

struct ByteOfSigns {
  const uint8_t* signs;
  int64_t row_bytes;
  __device__ uint32_t operator()(int64_t r, int64_t b) const { return signs[r * row_bytes + b]; }
};

template <class T>
__global__ void __launch_bounds__(256)
    scale_kernel(const int32_t* __restrict__ sums, int64_t row, const float* __restrict__ scale, int64_t n, int64_t m,
                 T* __restrict__ out) {
  for (int64_t r = blockIdx.y; r < n; r += gridDim.y) {
    for (int64_t c = blockIdx.x * int64_t{256} + threadIdx.x; c < m; c += gridDim.x * int64_t{256}) {
      out[r * m + c] = static_cast<T>(static_cast<float>(sums[r * row + c]) * scale[c]);
    }
  }
}

// a b^T in int32, [n, k] and [m, k] of int8; n above 16, k and m multiples of 8.
Tensor int8_product(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 2> stack{from(a), from(torch::stable::transpose(b, 0, 1))};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Through the tensor cores.
template <class T>
void multiply_bytes(const Launch& launch, const CountArgs<T>& p, const Tensor& x) {
  const int64_t n = p.n, m = p.m, padded = p.groups * 128, m_padded = (p.m + 7) / 8 * 8,
                n_padded = std::max<int64_t>(n, 17);
  const Tensor left = torch::stable::new_empty(x, {n_padded, padded}, ScalarType::Char);
  const Tensor right = torch::stable::new_empty(x, {m_padded, padded}, ScalarType::Char);
  spread_kernel<<<blocks(n_padded * padded / 8, 256), 256, 0, launch.stream>>>(
      ByteOfValues<T>{p.x, p.k, p.whole}, n, n_padded, p.k, padded, static_cast<uint2*>(left.mutable_data_ptr()));
  launch.check();
  spread_kernel<<<blocks(m_padded * padded / 8, 256), 256, 0, launch.stream>>>(
      ByteOfSigns{reinterpret_cast<const uint8_t*>(p.signs), p.groups * 16}, m, m_padded, p.k, padded,
      static_cast<uint2*>(right.mutable_data_ptr()));
  launch.check();
  const Tensor sums = int8_product(left, right);
  const dim3 grid(blocks(m, 256), static_cast<unsigned>(std::min<int64_t>(n, 65535)));
  scale_kernel<T><<<grid, 256, 0, launch.stream>>>(data<int32_t>(sums), m_padded, p.scale, n, m, p.out);
  launch.check();
}

Tensor multiply_signs(const Launch& launch, const Tensor& x, const Tensor& signs, const Tensor& scale) {
  const Tensor rows = as_contiguous(x), matrix = as_contiguous(signs), factor = as_contiguous(scale);
  const int64_t n = x.size(0), k = x.size(1), m = signs.size(0);
  Tensor out = empty_tensor(x, {n, m});
  if (n * m == 0) return out;
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = data<T>(rows);
    const bool whole = k % 8 == 0 && aligned16(from) && reinterpret_cast<uintptr_t>(from) % (8 * sizeof(T)) == 0;
    const CountArgs<T> p{from,
                         static_cast<const uint4*>(matrix.const_data_ptr()),
                         data<float>(factor),
                         mutable_data<T>(out),
                         n,
                         k,
                         m,
                         sign_groups(k),
                         whole};
    const int64_t row_bytes = std::max<int64_t>(p.groups * 16, 1);
    if (k > 0 && (n > kMostRows || row_bytes > kSharedBytes || !aligned16(p.signs))) {
      multiply_bytes(launch, p, rows);
    } else if (n == 1 || 8 * row_bytes > kSharedBytes) {
      if (m > 4096) {
        count<T, 1, 4>(launch, p);
      } else {
        count<T, 1, 2>(launch, p);
      }
    } else {
      count<T, 8, 2>(launch, p);
    }
  });
  return out;
}

std::tuple<Tensor, Tensor> pack(const Launch& launch, const Tensor& weight) {
  const Tensor matrix = as_contiguous(weight);
  const int64_t m = weight.size(0), k = weight.size(1);
  Tensor signs = torch::stable::new_empty(matrix, {m, sign_words(k)}, ScalarType::Int);
  Tensor scale = torch::stable::new_empty(matrix, {m}, ScalarType::Float);
  if (m == 0) return {signs, scale};
  dispatch_float_or_half(weight.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = data<T>(matrix);
    const bool whole = k % 8 == 0 && reinterpret_cast<uintptr_t>(from) % (8 * sizeof(T)) == 0;
    pack_kernel<T><<<blocks(m, 1), 256, 0, launch.stream>>>(
        from, m, k, whole, static_cast<uint8_t*>(signs.mutable_data_ptr()), mutable_data<float>(scale));
    launch.check();
  });
  return {signs, scale};
}

std::tuple<Tensor, Tensor> pack_signs_cuda(const Tensor& weight) {
  check_matrix("pack_signs", "weight", weight, "[M, K]");
  return pack(Launch("pack_signs", weight), weight);
}

Tensor binary_linear_cuda(const Tensor& x, const Tensor& weight) {
  check_binary_linear(x, weight);
  const Launch launch("binary_linear", x);
  const auto [signs, scale] = pack(launch, weight);
  return multiply_signs(launch, x, signs, scale);
}

Tensor binary_linear_packed_cuda(const Tensor& x, const Tensor& signs, const Tensor& scale) {
  check_binary_linear_packed(x, signs, scale);
  return multiply_signs(Launch("binary_linear_packed", x), x, signs, scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs_cuda));
  m.impl("binary_linear", TORCH_BOX(&binary_linear_cuda));
  m.impl("binary_linear_packed", TORCH_BOX(&binary_linear_packed_cuda));
}

}  // namespace cog_rwkv

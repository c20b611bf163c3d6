// depthwise_conv1d and its gradients: CUDA kernels and launches.
#include "depthwise_conv1d.h"

#include "../csrc/tensor.h"
#include "fourier.cuh"

namespace cog_rwkv {
namespace {

constexpr int kTile = 128;          // outputs of a warp in the plain kernels, 4 a lane
constexpr int kWarps = 8;           // of a block there
constexpr int64_t kPlain = 128;     // up to here the plain sum is faster than a transform
constexpr int64_t kLongest = 4096;  // up to here a transform fits into the registers of a block

// What a warp holds of a filter and an input.
struct Tile {
  float filter[2 * kTile];  // filter[lag + kTile - (t0 - u0)], 0 where there is none
  float input[kTile];
};

// sum[a] += filter[t - u] * input[u] for t = t0 + 4 lane + a and the u of all tiles up to t0, by one warp.
template <class T>
__device__ __forceinline__ void convolve_tile(Tile& tile, const Line<T>& filter, const Line<T>& input, int64_t t0,
                                              float (&sum)[4]) {
  const int lane = threadIdx.x % 32;
  for (int64_t u0 = 0; u0 <= t0; u0 += kTile) {
    __syncwarp();
    bool finite = true;
    for (int i = lane; i < 2 * kTile; i += 32) {
      const int64_t lag = t0 - u0 + i - kTile;
      tile.filter[i] = lag >= 0 && lag < filter.size ? filter.at(lag) : 0.0f;
      finite = finite && isfinite(tile.filter[i]);
    }
    for (int i = lane; i < kTile; i += 32) {
      tile.input[i] = u0 + i < input.size ? input.at(u0 + i) : 0.0f;
      finite = finite && isfinite(tile.input[i]);
    }
    __syncwarp();                          // the vote below orders no memory
    if (!__all_sync(kAllLanes, finite)) {  // 0 times infinity is no 0: leave out what is not in the sum
      for (int a = 0; a < 4; a++) {
        const int64_t t = t0 + 4 * lane + a;
        for (int u = 0; u < kTile && u0 + u <= t && t < input.size; u++) {
          sum[a] = fmaf(tile.filter[4 * lane + a - u + kTile], tile.input[u], sum[a]);
        }
      }
      continue;
    }
    const auto* window = reinterpret_cast<const float4*>(tile.filter) + lane + kTile / 4;
    float4 newer = window[0];
#pragma unroll 8
    for (int u = 0; u < kTile; u += 4) {
      const float4 older = window[-u / 4 - 1];
      const float4 x = reinterpret_cast<const float4*>(tile.input)[u / 4];
      const float h[8] = {older.x, older.y, older.z, older.w, newer.x, newer.y, newer.z, newer.w};
      const float in[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int a = 0; a < 4; a++) {
#pragma unroll
        for (int b = 0; b < 4; b++) sum[a] = fmaf(h[4 + a - b], in[b], sum[a]);
      }
      newer = older;
    }
  }
}

// A warp a row and tile.
template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    plain_filter_kernel(const T* __restrict__ w, const T* __restrict__ input, T* __restrict__ out, Conv p) {
  __shared__ __align__(16) Tile tiles[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_row = (p.time + kTile - 1) / kTile, items = p.batch * p.channels * per_row;
  for (int64_t i = blockIdx.x * int64_t{kWarps} + warp; i < items; i += gridDim.x * int64_t{kWarps}) {
    const int64_t row = i / per_row, t0 = (i - row * per_row) * kTile;
    float sum[4] = {};
    convolve_tile(tiles[warp], Line<T>{w + row % p.channels * p.time, p.time, true},
                  Line<T>{input + row * p.time, p.time, p.input_reversed}, t0, sum);
    for (int a = 0; a < 4; a++) {
      const int64_t t = t0 + 4 * lane + a;
      if (t < p.time) out[row * p.time + (p.out_reversed ? p.time - 1 - t : t)] = static_cast<T>(sum[a] + p.eps);
    }
  }
}

// A block a channel and tile; its warps share the batch.
template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    plain_weight_kernel(const T* __restrict__ gradient, const T* __restrict__ k, T* __restrict__ out, Conv p) {
  __shared__ __align__(16) Tile tiles[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_row = (p.time + kTile - 1) / kTile, items = p.channels * per_row;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const int64_t c = i / per_row, t0 = (i - c * per_row) * kTile;
    float sum[4] = {};
    for (int64_t b = warp; b < p.batch; b += kWarps) {
      const int64_t row = (b * p.channels + c) * p.time;
      convolve_tile(tiles[warp], Line<T>{k + row, p.time, false}, Line<T>{gradient + row, p.time, true}, t0, sum);
    }
    __syncwarp();
    for (int a = 0; a < 4; a++) tiles[warp].input[4 * lane + a] = sum[a];
    __syncthreads();
    for (int t = threadIdx.x; t < kTile && t0 + t < p.time; t += 32 * kWarps) {
      float total = 0.0f;
      for (int other = 0; other < kWarps; other++) total += tiles[other].input[t];
      out[c * p.time + t0 + t] = static_cast<T>(total);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    sum_kernel(const float* __restrict__ sums, int64_t parts, int64_t size, T* __restrict__ out) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < size; i += gridDim.x * int64_t{256}) {
    float total = 0.0f;
    for (int64_t part = 0; part < parts; part++) total += sums[part * size + i];
    out[i] = static_cast<T>(total);
  }
}

// Calls f with the number of points, as a type, of a transform for texts of this length.
template <class F>
void dispatch_points(int64_t time, F&& f) {
  if (time <= 256) return f(std::integral_constant<int, 512>{});
  if (time <= 512) return f(std::integral_constant<int, 1024>{});
  if (time <= 1024) return f(std::integral_constant<int, 2048>{});
  if (time <= 2048) return f(std::integral_constant<int, 4096>{});
  f(std::integral_constant<int, 8192>{});
}

// Blocks for transforms of `points`: one a channel, and as many parts of the batch as fill the device.
dim3 fourier_grid(const Conv& p, int points) {
  const int64_t pairs = (p.batch + 1) / 2, wanted = int64_t{1} << 18;  // threads: more than any GPU holds at once
  const int64_t parts = wanted / std::max<int64_t>(p.channels * (points / 16), 1);
  const int64_t x = std::min<int64_t>(p.channels, 1 << 20),
                y = std::clamp<int64_t>(parts, 1, std::min<int64_t>(pairs, 65535));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <int points, class Kernel>
int64_t allow_shared(const char* op, Kernel kernel) {
  constexpr int bytes = BlockFft<points>::shared_numbers * sizeof(float2);
  if (bytes > 48 * 1024)
    check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return bytes;
}

Rows rows_of(const Tensor& t, bool reversed) { return {t.data_ptr(), t.scalar_type(), t.size(t.dim() - 1), reversed}; }

bool transforms(int64_t time) { return time > kPlain && time <= kLongest; }

// [B, C, T] from filters [C, T] and inputs [B, C, T].
Tensor filtered(const char* op, const Tensor& w, const Tensor& input, const Conv& p) {
  const Launch launch(op, input);
  const Tensor filters = as_contiguous(w), inputs = as_contiguous(input);
  Tensor out = empty_tensor(input, {p.batch, p.channels, p.time});
  if (out.numel() == 0) return out;
  if (transforms(p.time)) {
    dispatch_points(p.time, [&](auto n) {
      constexpr int points = decltype(n)::value;
      const int64_t shared = allow_shared<points>(op, fourier_filter_kernel<points>);
      fourier_filter_kernel<points><<<fourier_grid(p, points), points / 16, shared, launch.stream>>>(
          rows_of(filters, true), rows_of(inputs, p.input_reversed), rows_of(out, p.out_reversed), p.batch, p.channels,
          p.eps);
    });
  } else {
    dispatch_float_or_half(input.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      const int64_t items = p.batch * p.channels * ((p.time + kTile - 1) / kTile);
      plain_filter_kernel<T><<<blocks(items, kWarps), 32 * kWarps, 0, launch.stream>>>(
          data<T>(filters), data<T>(inputs), mutable_data<T>(out), p);
    });
  }
  launch.check();
  return out;
}

// [C, T], summed over the batch.
Tensor correlated(const char* op, const Tensor& gradient, const Tensor& k) {
  const Launch launch(op, k);
  const Tensor gradients = as_contiguous(gradient), signals = as_contiguous(k);
  const Conv p{k.size(0), k.size(1), k.size(2), true, false, 0.0f};
  if (p.batch == 0) return torch::stable::new_zeros(k, {p.channels, p.time});
  Tensor out = empty_tensor(k, {p.channels, p.time});
  if (out.numel() == 0) return out;
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    if (!transforms(p.time)) {
      const int64_t items = p.channels * ((p.time + kTile - 1) / kTile);
      plain_weight_kernel<T><<<blocks(items, 1), 32 * kWarps, 0, launch.stream>>>(data<T>(gradients), data<T>(signals),
                                                                                  mutable_data<T>(out), p);
      return launch.check();
    }
    dispatch_points(p.time, [&](auto n) {
      constexpr int points = decltype(n)::value;
      const int64_t shared = allow_shared<points>(op, fourier_weight_kernel<points>);
      const dim3 grid = fourier_grid(p, points);
      const Tensor sums = torch::stable::new_empty(k, {grid.y, p.channels, p.time}, ScalarType::Float);
      fourier_weight_kernel<points><<<grid, points / 16, shared, launch.stream>>>(
          rows_of(gradients, true), rows_of(signals, false), rows_of(sums, false), p.batch, p.channels);
      launch.check();
      const int64_t size = p.channels * p.time;
      sum_kernel<T>
          <<<blocks(size, 256), 256, 0, launch.stream>>>(data<float>(sums), grid.y, size, mutable_data<T>(out));
      launch.check();
    });
  });
  return out;
}

Tensor depthwise_conv1d_cuda(const Tensor& w, const Tensor& k, double eps) {
  check_signal("depthwise_conv1d", "k", k);
  check_filter("depthwise_conv1d", w, "k", k);
  const Conv p{k.size(0), k.size(1), k.size(2), false, false, static_cast<float>(eps)};
  return filtered("depthwise_conv1d", w, k, p);
}

Tensor depthwise_conv1d_backward_k_cuda(const Tensor& gradient, const Tensor& w) {
  check_signal("depthwise_conv1d_backward_k", "gradient", gradient);
  check_filter("depthwise_conv1d_backward_k", w, "gradient", gradient);
  const Conv p{gradient.size(0), gradient.size(1), gradient.size(2), true, true, 0.0f};
  return filtered("depthwise_conv1d_backward_k", w, gradient, p);
}

Tensor depthwise_conv1d_backward_w_cuda(const Tensor& gradient, const Tensor& k) {
  check_signal("depthwise_conv1d_backward_w", "k", k);
  check_like("depthwise_conv1d_backward_w", "gradient", gradient, "k", k);
  return correlated("depthwise_conv1d_backward_w", gradient, k);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("depthwise_conv1d", TORCH_BOX(&depthwise_conv1d_cuda));
  m.impl("depthwise_conv1d_backward_k", TORCH_BOX(&depthwise_conv1d_backward_k_cuda));
  m.impl("depthwise_conv1d_backward_w", TORCH_BOX(&depthwise_conv1d_backward_w_cuda));
}

}  // namespace cog_rwkv

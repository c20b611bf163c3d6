// depthwise_conv1d through Fourier transforms: a block a channel, which it keeps in registers while it goes through the
// batch, two rows at once as the real and the imaginary part of one.
#pragma once

#include "../csrc/cuda.cuh"
#include "../csrc/reduce.cuh"
#include "depthwise_conv1d.h"
#include "fft.cuh"

namespace cog_rwkv {

constexpr uint32_t kInfinity = 0x7f800000;

// A power of two near 1 / x for the bits of a magnitude, and its inverse. Rows of one transform are brought to one size
// by it, or the rounding errors of the larger would drown the smaller.
__device__ __forceinline__ float scale_to_one(uint32_t bits) {
  return __uint_as_float((254 - min(max(bits >> 23, 1u), 253u)) << 23);
}
__device__ __forceinline__ float scale_back(uint32_t bits) {
  return __uint_as_float(min(max(bits >> 23, 1u), 253u) << 23);
}

// The largest of both over a block of up to 32 warps. As integers: infinity and NaN are above every number.
// `shared` has room for 64, and nobody reads it any more when all threads have passed another barrier.
__device__ __forceinline__ uint2 largest(uint2 bits, uint32_t* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  bits = {__reduce_max_sync(kAllLanes, bits.x), __reduce_max_sync(kAllLanes, bits.y)};
  if (lane == 0) {
    shared[warp] = bits.x;
    shared[32 + warp] = bits.y;
  }
  __syncthreads();
  const bool there = lane < warps;
  return {__reduce_max_sync(kAllLanes, there ? shared[lane] : 0),
          __reduce_max_sync(kAllLanes, there ? shared[32 + lane] : 0)};
}

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A [B, C, T] of any dtype, its rows read or written from the front or from the back. The dtype is a value and no type:
// a transform takes the compiler seconds, and it is the same for all of them.
struct Rows {
  void* values;
  ScalarType type;
  int64_t size;
  bool reversed;
};

template <class F>
__device__ __forceinline__ void dispatch_rows(ScalarType type, F&& f) {
  if (type == ScalarType::Float) return f(Type<float>{});
  if (type == ScalarType::Half) return f(Type<Half>{});
  f(Type<BFloat16>{});
}

template <class T>
__device__ __forceinline__ Line<T> line(const Rows& rows, int64_t row) {
  return {static_cast<const T*>(rows.values) + row * rows.size, rows.size, rows.reversed};
}

// v[j] = (row a, row b)[thread + j * threads]; zeros behind the end, and in place of b where there is no `two`. Returns
// the largest magnitudes of this thread.
template <int threads>
__device__ __forceinline__ uint2 load_pair(float2 (&v)[16], const Rows& rows, int64_t a, int64_t b, bool two) {
  uint2 most{0, 0};
  dispatch_rows(rows.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const Line<T> one = line<T>(rows, a), other = line<T>(rows, two ? b : a);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int64_t t = threadIdx.x + j * threads;
      v[j] = t < rows.size ? float2{one.at(t), other.at(t)} : float2{0.0f, 0.0f};
    }
  });
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[8 + j] = {0.0f, 0.0f};
    if (!two) v[j].y = 0.0f;
    most = {max(most.x, magnitude(v[j].x)), max(most.y, magnitude(v[j].y))};
  }
  return most;
}

// Row `row` = part(v[j]) * scale + eps
template <int threads, class Part>
__device__ __forceinline__ void store_row(const float2 (&v)[16], const Rows& rows, int64_t row, float scale, float eps,
                                          Part part) {
  dispatch_rows(rows.type, [&](auto type) {
    using T = typename decltype(type)::type;
    T* out = static_cast<T*>(rows.values) + row * rows.size;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int64_t t = threadIdx.x + j * threads;
      if (t < rows.size) out[rows.reversed ? rows.size - 1 - t : t] = static_cast<T>(fmaf(part(v[j]), scale, eps));
    }
  });
}

// The plain sum, for a row that holds an infinity or a NaN: a transform would spread it over the row.
__device__ __noinline__ void plain_row(const Rows& filters, int64_t c, const Rows& inputs, const Rows& outs,
                                       int64_t row, float eps) {
  dispatch_rows(outs.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const Line<T> filter = line<T>(filters, c), input = line<T>(inputs, row);
    T* out = static_cast<T*>(outs.values) + row * outs.size;
    for (int64_t t = threadIdx.x; t < outs.size; t += blockDim.x) {
      float sum = 0.0f;
      for (int64_t u = 0; u <= t; u++) sum = fmaf(filter.at(t - u), input.at(u), sum);
      out[outs.reversed ? outs.size - 1 - t : t] = static_cast<T>(sum + eps);
    }
  });
}

// Brings both rows to a size near 1; one that is not finite is left to plain_row.
__device__ __forceinline__ void scale_pair(float2 (&v)[16], uint2 bits) {
  const float2 scale{scale_to_one(bits.x), scale_to_one(bits.y)};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[j] = {bits.x < kInfinity ? v[j].x * scale.x : 0.0f, bits.y < kInfinity ? v[j].y * scale.y : 0.0f};
  }
}

// out[b, c] = filter[c] * input[b, c] + eps. Blocks x go over the channels, y over the pairs of rows.
template <int N>
__global__ void __launch_bounds__(N / 16, 8192 / N)
    fourier_filter_kernel(Rows filters, Rows inputs, Rows outs, int64_t batch, int64_t channels, float eps) {
  constexpr int threads = N / 16;
  extern __shared__ float2 shared[];
  __shared__ uint32_t found[64];
  const BlockFft<N> fft(shared);
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    float2 h[16];
    const bool plain = __syncthreads_or(load_pair<threads>(h, filters, c, c, false).x >= kInfinity);
    fft.forward(h);
    for (int64_t b = 2 * blockIdx.y; b < batch; b += 2 * gridDim.y) {
      const int64_t first = b * channels + c, second = first + channels;
      const bool two = b + 1 < batch;
      float2 v[16];
      const uint2 bits = largest(load_pair<threads>(v, inputs, first, second, two), found);
      scale_pair(v, bits);
      fft.forward(v);
#pragma unroll
      for (int j = 0; j < 16; j++) v[j] = v[j] * h[j];
      fft.inverse(v);
      if (!plain && bits.x < kInfinity) {
        store_row<threads>(v, outs, first, scale_back(bits.x) / N, eps, [](float2 z) { return z.x; });
      } else {
        plain_row(filters, c, inputs, outs, first, eps);
      }
      if (!two) break;
      if (!plain && bits.y < kInfinity) {
        store_row<threads>(v, outs, second, scale_back(bits.y) / N, eps, [](float2 z) { return z.y; });
      } else {
        plain_row(filters, c, inputs, outs, second, eps);
      }
    }
    __syncthreads();
  }
}

// Row [y, c] of `sums` = the sum over the rows b of block y of k[b, c] * reversed gradient[b, c]. With two rows as one
// complex one, (k + i k') (g - i g') has k g + k' g' for its real part.
template <int N>
__global__ void __launch_bounds__(N / 16, 8192 / N)
    fourier_weight_kernel(Rows gradients, Rows signals, Rows sums, int64_t batch, int64_t channels) {
  constexpr int threads = N / 16;
  extern __shared__ float2 shared[];
  __shared__ uint32_t found[64];
  const BlockFft<N> fft(shared);
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    float2 total[16] = {};
    for (int64_t b = 2 * blockIdx.y; b < batch; b += 2 * gridDim.y) {
      const int64_t first = b * channels + c, second = first + channels;
      const bool two = b + 1 < batch;
      float2 z[16], v[16];
      const uint2 bits = largest(load_pair<threads>(z, signals, first, second, two), found);
      // What the one factor is divided by the other is multiplied with: the products keep their sizes.
      const float2 scale{scale_to_one(bits.x), scale_to_one(bits.y)}, back{scale_back(bits.x), -scale_back(bits.y)};
#pragma unroll
      for (int j = 0; j < 8; j++) z[j] = {z[j].x * scale.x, z[j].y * scale.y};
      fft.forward(z);
      load_pair<threads>(v, gradients, first, second, two);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = {v[j].x * back.x, v[j].y * back.y};
      __syncthreads();  // every thread has read what forward() leaves in shared memory
      fft.forward(v);
#pragma unroll
      for (int j = 0; j < 16; j++) total[j] = total[j] + z[j] * v[j];
    }
    fft.inverse(total);
    store_row<threads>(total, sums, blockIdx.y * channels + c, 1.0f / N, 0.0f, [](float2 z) { return z.x; });
    __syncthreads();
  }
}

}  // namespace cog_rwkv

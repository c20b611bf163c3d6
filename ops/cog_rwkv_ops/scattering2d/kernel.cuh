// CUDA kernels of the parts of scattering2d.
#pragma once

#include "../csrc/cuda.cuh"
#include "scattering2d.h"

namespace cog_rwkv {

// The CPU's counterpart is mirrored() in scattering2d.cpp.
__device__ __forceinline__ int64_t mirrored(int64_t i, int64_t size, int64_t padded) {
  const int64_t period = 2 * (size - 1);
  const int64_t place = (i - (padded - size) / 2 + 2 * period) % period;
  return min(place, period - place);
}

template <class T>
__global__ void __launch_bounds__(256) pad_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t planes,
                                                  int64_t m_size, int64_t n_size, int64_t height, int64_t width) {
  const int64_t total = planes * height * width, step = int64_t{256} * gridDim.x;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < total; i += step) {
    const int64_t row = i / width, p = row / height;
    out[i] = x[(p * m_size + mirrored(row % height, m_size, height)) * n_size + mirrored(i % width, n_size, width)];
  }
}

// The places of the padded line that came from place m: itself and its mirror images, up to 3.
__device__ __forceinline__ int images(int64_t m, int64_t size, int64_t padded, int64_t* places) {
  const int64_t period = 2 * (size - 1), before = (padded - size) / 2;
  int count = 0;
  for (int turn = -2; turn <= 2; turn++) {
    const int64_t there = before + m + turn * period, back = before - m + turn * period;
    if (there >= 0 && there < padded) places[count++] = there;
    if (m != 0 && m != size - 1 && back >= 0 && back < padded) places[count++] = back;
  }
  return count;
}

template <class T>
__global__ void __launch_bounds__(256)
    pad_adjoint_kernel(const T* __restrict__ gradient, T* __restrict__ out, int64_t planes, int64_t m_size,
                       int64_t n_size, int64_t height, int64_t width) {
  const int64_t total = planes * m_size * n_size, step = int64_t{256} * gridDim.x;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < total; i += step) {
    const int64_t row = i / n_size, p = row / m_size;
    int64_t rows[10], columns[10];
    const int row_count = images(row % m_size, m_size, height, rows);
    const int column_count = images(i % n_size, n_size, width, columns);
    T sum = 0;
    for (int a = 0; a < row_count; a++) {
      for (int b = 0; b < column_count; b++) sum += gradient[(p * height + rows[a]) * width + columns[b]];
    }
    out[i] = sum;
  }
}

// Element (m, n) of the whole spectrum of a real plane, from its half.
template <class T>
__device__ __forceinline__ Vector<T, 2> spectrum_at(const T* half, int64_t m, int64_t n, const FilterSizes& s) {
  const bool mirror = n >= s.half();
  if (mirror) m = m == 0 ? 0 : s.height - m, n = s.width - n;
  Vector<T, 2> x = load_vector<T, 2>(half + (m * s.half() + n) * 2);
  if (mirror) x.values[1] = -x.values[1];
  return x;
}

// A thread computes one place of P planes and F filters, so that what it reads of either is used several times.
template <int P, int F, class T>
__global__ void __launch_bounds__(256) filter_kernel(const T* __restrict__ spectrum, const T* __restrict__ filters,
                                                     T* __restrict__ out, FilterSizes s, int64_t count) {
  const int64_t h = s.out_height(), w = s.out_width(), whole = s.height * s.width;
  const int64_t filter_groups = (s.filters + F - 1) / F;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += int64_t{256} * gridDim.x) {
    const int64_t b = i % w, a = i / w % h, group = i / (w * h);
    const int64_t f0 = group % filter_groups * F, p0 = group / filter_groups * P;
    T re[P][F] = {}, im[P][F] = {};
    for (int64_t m = a; m < s.height; m += h) {
      for (int64_t n = b; n < s.width; n += w) {
        Vector<T, 2> x[P];
        T psi[F];
#pragma unroll
        for (int p = 0; p < P; p++) {
          x[p] = spectrum_at(spectrum + min(p0 + p, s.planes - 1) * s.height * s.half() * 2, m, n, s);
        }
#pragma unroll
        for (int f = 0; f < F; f++) psi[f] = filters[min(f0 + f, s.filters - 1) * whole + m * s.width + n];
#pragma unroll
        for (int p = 0; p < P; p++) {
#pragma unroll
          for (int f = 0; f < F; f++) re[p][f] += x[p].values[0] * psi[f], im[p][f] += x[p].values[1] * psi[f];
        }
      }
    }
#pragma unroll
    for (int p = 0; p < P; p++) {
#pragma unroll
      for (int f = 0; f < F; f++) {
        if (p0 + p >= s.planes || f0 + f >= s.filters) continue;
        store_vector(out + (((p0 + p) * s.filters + f0 + f) * h + a) * w * 2 + b * 2, Vector<T, 2>{re[p][f], im[p][f]});
      }
    }
  }
}

// A thread computes one place of P planes: see filter_adjoint_plane in kernel.h.
template <int P, class T>
__global__ void __launch_bounds__(256)
    filter_adjoint_kernel(const T* __restrict__ gradient, const T* __restrict__ filters, T* __restrict__ out,
                          FilterSizes s, int64_t count) {
  const int64_t h = s.out_height(), w = s.out_width(), half = s.half();
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += int64_t{256} * gridDim.x) {
    const int64_t n = i % half, m = i / half % s.height, p0 = i / (half * s.height) * P;
    const int64_t back_m = m == 0 ? 0 : s.height - m, back_n = n == 0 ? 0 : s.width - n;
    const int64_t here = (m % h * w + n % w) * 2, back = (back_m % h * w + back_n % w) * 2;
    Vector<T, 2> sum[P] = {};
    for (int64_t f = 0; f < s.filters; f++) {
      const T* psi = filters + f * s.height * s.width;
      const T scale = psi[m * s.width + n] / 2, back_scale = psi[back_m * s.width + back_n] / 2;
#pragma unroll
      for (int p = 0; p < P; p++) {
        const T* from = gradient + (min(p0 + p, s.planes - 1) * s.filters + f) * h * w * 2;
        const Vector<T, 2> x = load_vector<T, 2>(from + here), y = load_vector<T, 2>(from + back);
        sum[p].values[0] += scale * x.values[0] + back_scale * y.values[0];
        sum[p].values[1] += scale * x.values[1] - back_scale * y.values[1];
      }
    }
#pragma unroll
    for (int p = 0; p < P; p++) {
      if (p0 + p < s.planes) store_vector(out + (((p0 + p) * s.height + m) * half + n) * 2, sum[p]);
    }
  }
}

template <class T>
__device__ __forceinline__ T modulus_of(const Vector<T, 2>& z) {
  return sqrt(z.values[0] * z.values[0] + z.values[1] * z.values[1]);
}

template <class T>
__global__ void __launch_bounds__(256) modulus_kernel(const T* __restrict__ z, T* __restrict__ out, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += int64_t{256} * gridDim.x) {
    out[i] = modulus_of(load_vector<T, 2>(z + 2 * i));
  }
}

constexpr int kLowRows = 8;  // rows of the result that a block computes of each of its planes

// How `low` is cut into blocks: `planes` planes at once where they are narrow, a strip of kLowRows rows.
struct LowWork {
  int planes;
  int64_t strips, blocks;

  template <class T>
  __host__ __device__ int64_t padded_rows(const Line<T>& rows) const {
    return rows.count + 2 * (kLowRows - 1) * rows.step;
  }
  // Values of shared memory: taps with zeros around them, taps, the strips.
  template <class T>
  int64_t shared(const Line<T>& rows, const Line<T>& columns) const {
    return padded_rows(rows) + columns.count + planes * kLowRows * columns.size;
  }
};

template <class T>
LowWork low_work(const LowSizes& s, const Line<T>& rows, const Line<T>& columns, int64_t threads) {
  const int64_t planes = std::clamp<int64_t>(threads / s.width, 1, 16);
  const int64_t strips = (rows.outputs() + kLowRows - 1) / kLowRows;
  return {static_cast<int>(planes), strips, (s.planes + planes - 1) / planes * strips};
}

// Along the columns from memory into a strip, then along its rows.
template <class T, bool complex>
__global__ void __launch_bounds__(256)
    low_kernel(const T* __restrict__ in, Line<T> rows, Line<T> columns, T* __restrict__ out, LowSizes s, LowWork work) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int around = (kLowRows - 1) * static_cast<int>(rows.step), width = static_cast<int>(s.width);
  const int h = static_cast<int>(rows.outputs()), w = static_cast<int>(columns.outputs());
  const int row_count = static_cast<int>(rows.count), column_count = static_cast<int>(columns.count);
  T* row_taps = reinterpret_cast<T*>(memory);
  T* column_taps = row_taps + row_count + 2 * around;
  T* strip = column_taps + column_count;  // [plane][row][width]
  for (int t = threadIdx.x; t < row_count + 2 * around; t += 256) {
    row_taps[t] = t >= around && t < around + row_count ? rows.taps[t - around] : T{0};
  }
  for (int t = threadIdx.x; t < column_count; t += 256) column_taps[t] = columns.taps[t];
  __syncthreads();
  for (int64_t block = blockIdx.x; block < work.blocks; block += gridDim.x) {
    const int r0 = static_cast<int>(block % work.strips) * kLowRows;
    const int64_t p0 = block / work.strips * work.planes;
    const int planes = static_cast<int>(min(int64_t{work.planes}, s.planes - p0));
    const int strip_rows = min(kLowRows, h - r0);
    for (int item = threadIdx.x; item < planes * width; item += 256) {
      const int plane = item / width, n = item % width;
      const T* from = in + (p0 + plane) * s.height * s.width * (complex ? 2 : 1);
      T sum[kLowRows] = {};
      int64_t m = ((r0 + 1) * rows.step + rows.size - rows.middle) % rows.size;
      const int count = row_count + (strip_rows - 1) * static_cast<int>(rows.step);
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        T u;
        if constexpr (complex) {
          u = modulus_of(load_vector<T, 2>(from + (m * s.width + n) * 2));
        } else {
          u = from[m * s.width + n];
        }
        m = m + 1 == rows.size ? 0 : m + 1;
#pragma unroll
        for (int r = 0; r < kLowRows; r++) sum[r] += row_taps[around + i - r * static_cast<int>(rows.step)] * u;
      }
#pragma unroll
      for (int r = 0; r < kLowRows; r++) strip[(plane * kLowRows + r) * width + n] = sum[r];
    }
    __syncthreads();
    for (int item = threadIdx.x; item < planes * strip_rows * w; item += 256) {
      const int c = item % w, r = item / w % strip_rows, plane = item / (w * strip_rows);
      const T* from = strip + (plane * kLowRows + r) * width;
      int n = static_cast<int>(((c + 1) * columns.step + columns.size - columns.middle) % columns.size);
      T sum = 0;
      for (int t = 0; t < column_count; t++) {
        sum += column_taps[t] * from[n];
        n = n + 1 == width ? 0 : n + 1;
      }
      out[((p0 + plane) * h + r0 + r) * w + c] = sum;
    }
    __syncthreads();
  }
}

constexpr int kAdjointRows = 8;  // rows of the gradient that a block computes

// taps of `line` by distance from an output's place: [size], zero where the filter does not reach.
template <class T>
__device__ __forceinline__ void spread_taps(const Line<T>& line, T* taps) {
  for (int i = threadIdx.x; i < line.size; i += 256) {
    const int64_t t = (i + line.middle) % line.size;
    taps[i] = t < line.count ? line.taps[t] : T{0};
  }
}

// Of one plane, kAdjointRows rows: first the sums over the rows of the gradient, then those over its columns.
template <class T>
__global__ void __launch_bounds__(256)
    low_adjoint_kernel(const T* __restrict__ gradient, Line<T> rows, Line<T> columns, const T* __restrict__ z,
                       const T* __restrict__ more, T* __restrict__ out, LowSizes s, int64_t strips) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int height = static_cast<int>(s.height), width = static_cast<int>(s.width), step = static_cast<int>(s.step);
  const int h = static_cast<int>(rows.outputs()), w = static_cast<int>(columns.outputs());
  T* row_taps = reinterpret_cast<T*>(memory);
  T* column_taps = row_taps + height;
  T* sums = column_taps + width;  // [kAdjointRows][w]
  spread_taps(rows, row_taps);
  spread_taps(columns, column_taps);
  __syncthreads();
  for (int64_t block = blockIdx.x; block < s.planes * strips; block += gridDim.x) {
    const int m0 = static_cast<int>(block % strips) * kAdjointRows;
    const int64_t p = block / strips;
    const int strip_rows = min(kAdjointRows, height - m0);
    for (int item = threadIdx.x; item < strip_rows * w; item += 256) {
      const int c = item % w, m = m0 + item / w;
      int distance = m - step;
      T sum = 0;
      for (int r = 0; r < h; r++, distance -= step) {
        sum += row_taps[distance < 0 ? distance + height : distance] * gradient[(p * h + r) * w + c];
      }
      sums[item] = sum;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < strip_rows * width; item += 256) {
      const int n = item % width, row = item / width;
      int distance = n - step;
      T sum = 0;
      for (int c = 0; c < w; c++, distance -= step) {
        sum += column_taps[distance < 0 ? distance + width : distance] * sums[row * w + c];
      }
      const int64_t i = (p * height + m0 + row) * s.width + n;
      if (z == nullptr) {
        out[i] = sum;
        continue;
      }
      if (more != nullptr) sum += more[i];
      const Vector<T, 2> at = load_vector<T, 2>(z + 2 * i);
      const T size = modulus_of(at), scale = size > 0 ? sum / size : T{0};
      store_vector(out + 2 * i, Vector<T, 2>{scale * at.values[0], scale * at.values[1]});
    }
    __syncthreads();
  }
}

}  // namespace cog_rwkv

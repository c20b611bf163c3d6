// CPU loops of the parts of scattering2d over one plane, for the compiler to vectorise: call them inside best_cpu().
#pragma once

#include <cmath>
#include <vector>

#include "../csrc/cpu.h"
#include "scattering2d.h"

namespace cog_rwkv {

// Row m of the whole spectrum of a real plane, from its half: real parts and imaginary parts apart.
template <class T>
COG_RWKV_INLINE void expand_row(const T* half, int64_t m, const FilterSizes& s, T* re, T* im) {
  const T* row = half + m * s.half() * 2;
  const T* mirror = half + (m == 0 ? 0 : s.height - m) * s.half() * 2;
  for (int64_t n = 0; n < s.half(); n++) re[n] = row[2 * n], im[n] = row[2 * n + 1];
  for (int64_t n = s.half(); n < s.width; n++) {
    re[n] = mirror[2 * (s.width - n)];
    im[n] = -mirror[2 * (s.width - n) + 1];
  }
}

// out [F, h, w, 2] of one plane. `buffer` holds 2 (step + 1) W values.
template <class T>
COG_RWKV_INLINE void filter_plane(const T* half, const T* filters, const FilterSizes& s, T* out, T* buffer) {
  const int64_t w = s.out_width(), h = s.out_height();
  T* rows = buffer;
  T* re = buffer + 2 * s.step * s.width;
  T* im = re + w;
  for (int64_t a = 0; a < h; a++) {
    for (int64_t i = 0; i < s.step; i++) {
      expand_row(half, a + i * h, s, rows + 2 * i * s.width, rows + (2 * i + 1) * s.width);
    }
    for (int64_t f = 0; f < s.filters; f++) {
      for (int64_t b = 0; b < w; b++) re[b] = 0, im[b] = 0;
      for (int64_t i = 0; i < s.step; i++) {
        for (int64_t j = 0; j < s.step; j++) {
          const T* x = rows + 2 * i * s.width + j * w;
          const T* y = x + s.width;
          const T* psi = filters + (f * s.height + a + i * h) * s.width + j * w;
          for (int64_t b = 0; b < w; b++) re[b] += x[b] * psi[b], im[b] += y[b] * psi[b];
        }
      }
      T* to = out + (f * h + a) * w * 2;
      for (int64_t b = 0; b < w; b++) to[2 * b] = re[b], to[2 * b + 1] = im[b];
    }
  }
}

// The half spectrum [H, W/2+1, 2] of the real plane that the adjoint of filter_plane gives: the part of
// G = sum over f of filters[f] * gradient[f], repeated, that belongs to a real plane. `buffer` holds 2 H W values.
template <class T>
COG_RWKV_INLINE void filter_adjoint_plane(const T* gradient, const T* filters, const FilterSizes& s, T* out,
                                          T* buffer) {
  const int64_t w = s.out_width(), h = s.out_height(), size = s.height * s.width;
  for (int64_t i = 0; i < 2 * size; i++) buffer[i] = 0;
  for (int64_t f = 0; f < s.filters; f++) {
    for (int64_t m = 0; m < s.height; m++) {
      const T* from = gradient + (f * h + m % h) * w * 2;
      for (int64_t j = 0; j < s.step; j++) {
        const T* psi = filters + (f * s.height + m) * s.width + j * w;
        T* to = buffer + (m * s.width + j * w) * 2;
        for (int64_t b = 0; b < w; b++) to[2 * b] += psi[b] * from[2 * b], to[2 * b + 1] += psi[b] * from[2 * b + 1];
      }
    }
  }
  for (int64_t m = 0; m < s.height; m++) {
    const T* row = buffer + m * s.width * 2;
    const T* mirror = buffer + (m == 0 ? 0 : s.height - m) * s.width * 2;
    T* to = out + m * s.half() * 2;
    for (int64_t n = 0; n < s.half(); n++) {
      const int64_t back = n == 0 ? 0 : s.width - n;
      to[2 * n] = (row[2 * n] + mirror[2 * back]) / 2;
      to[2 * n + 1] = (row[2 * n + 1] - mirror[2 * back + 1]) / 2;
    }
  }
}

template <class T>
COG_RWKV_INLINE void modulus_range(const T* z, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i++) out[i] = std::sqrt(z[2 * i] * z[2 * i] + z[2 * i + 1] * z[2 * i + 1]);
}

// out [h, w] of one real plane u. `buffer` holds h (2 W + 1) values.
template <class T>
COG_RWKV_INLINE void low_plane(const T* u, const Line<T>& rows, const Line<T>& columns, T* out, T* buffer) {
  const int64_t h = rows.outputs(), w = columns.outputs(), width = columns.size;
  T* along = buffer;                 // [h, W]
  T* turned = buffer + h * width;    // [W, h]
  T* sums = buffer + 2 * h * width;  // [h]
  for (int64_t i = 0; i < h * width; i++) along[i] = 0;
  for (int64_t r = 0; r < h; r++) {
    int64_t m = ((r + 1) * rows.step + rows.size - rows.middle) % rows.size;
    for (int64_t t = 0; t < rows.count; t++, m = m + 1 == rows.size ? 0 : m + 1) {
      const T tap = rows.taps[t];
      for (int64_t n = 0; n < width; n++) along[r * width + n] += tap * u[m * width + n];
    }
  }
  for (int64_t r = 0; r < h; r++) {
    for (int64_t n = 0; n < width; n++) turned[n * h + r] = along[r * width + n];
  }
  for (int64_t c = 0; c < w; c++) {
    for (int64_t r = 0; r < h; r++) sums[r] = 0;
    int64_t n = ((c + 1) * columns.step + columns.size - columns.middle) % columns.size;
    for (int64_t t = 0; t < columns.count; t++, n = n + 1 == columns.size ? 0 : n + 1) {
      const T tap = columns.taps[t];
      for (int64_t r = 0; r < h; r++) sums[r] += tap * turned[n * h + r];
    }
    for (int64_t r = 0; r < h; r++) out[r * w + c] = sums[r];
  }
}

// The filter as a matrix [outputs, size].
template <class T>
std::vector<T> dense(const Line<T>& line) {
  std::vector<T> matrix(std::max<int64_t>(line.outputs(), 0) * line.size, T{0});
  for (int64_t i = 0; i < line.outputs(); i++) {
    for (int64_t t = 0; t < line.count; t++) {
      matrix[i * line.size + ((i + 1) * line.step + line.size - line.middle + t) % line.size] += line.taps[t];
    }
  }
  return matrix;
}

// The gradient [H, W] of a real plane. `rows` and `columns` are dense(); `buffer` holds h W values.
template <class T>
COG_RWKV_INLINE void low_adjoint_plane(const T* gradient, const T* rows, const T* columns, int64_t h, int64_t w,
                                       int64_t height, int64_t width, T* out, T* buffer) {
  for (int64_t i = 0; i < h * width; i++) buffer[i] = 0;
  for (int64_t i = 0; i < height * width; i++) out[i] = 0;
  for (int64_t r = 0; r < h; r++) {
    for (int64_t c = 0; c < w; c++) {
      const T g = gradient[r * w + c];
      for (int64_t n = 0; n < width; n++) buffer[r * width + n] += g * columns[c * width + n];
    }
  }
  for (int64_t m = 0; m < height; m++) {
    for (int64_t r = 0; r < h; r++) {
      const T tap = rows[r * height + m];
      for (int64_t n = 0; n < width; n++) out[m * width + n] += tap * buffer[r * width + n];
    }
  }
}

// From the gradient of the moduli of z to that of z: u z / |z|, or 0 where z is 0. `more` is added to u if given.
template <class T>
COG_RWKV_INLINE void modulus_adjoint_range(const T* u, const T* more, const T* z, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i++) {
    const T size = std::sqrt(z[2 * i] * z[2 * i] + z[2 * i + 1] * z[2 * i + 1]);
    const T g = more == nullptr ? u[i] : u[i] + more[i];
    const T scale = size > 0 ? g / size : T{0};
    out[2 * i] = scale * z[2 * i];
    out[2 * i + 1] = scale * z[2 * i + 1];
  }
}

}  // namespace cog_rwkv

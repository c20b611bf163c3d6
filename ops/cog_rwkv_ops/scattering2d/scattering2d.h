// The parts of scattering2d: the checks of their arguments, the same on every device. float32 and float64.
//
//   pad             x [P, M, N] -> [P, H, W], mirrored about its borders
//   filter          half of the spectrum of real planes [P, H, W/2+1, 2], filters [F, H, W] -> [P, F, H/step, W/step,
//   2] modulus         z [..., 2] -> [...] low             real [P, H, W] or the modulus of complex [P, H, W, 2] ->
//   averages [P, H/step - 2, W/step - 2]
// and the adjoints of the linear ones.
#pragma once

#include <optional>

#include "../csrc/beside.h"
#include "../csrc/dtype.h"
#include "../csrc/math.h"

namespace cog_rwkv {

using MaybeTensor = std::optional<Tensor>;

inline void check_float_or_double(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t, {ScalarType::Float, ScalarType::Double});
}

template <class F>
void dispatch_float_or_double(ScalarType type, F&& f) {
  if (type == ScalarType::Double) return f(Type<double>{});
  return f(Type<float>{});
}

inline void check_planes(const char* op, const char* name, const Tensor& t) {
  check_float_or_double(op, name, t);
  check_dim(op, name, t, 3, "[P, H, W]");
}

// One dimension of the padding: where its elements come from. At most as many are added at an end as there are.
inline void check_pad(const char* op, int64_t size, int64_t padded) {
  if (size < 2 || padded < size || padded - size > 2 * size)
    fail(op, "a side of " + std::to_string(size) + " cannot be extended to " + std::to_string(padded));
}

// The sizes of `filter` and of its adjoint.
struct FilterSizes {
  int64_t planes, filters, height, width, step;

  COG_RWKV_BOTH int64_t out_height() const { return height / step; }
  COG_RWKV_BOTH int64_t out_width() const { return width / step; }
  COG_RWKV_BOTH int64_t half() const { return width / 2 + 1; }
};

inline FilterSizes check_filters(const char* op, const Tensor& filters, int64_t planes, int64_t step) {
  check_planes(op, "filters", filters);
  const FilterSizes s{planes, filters.size(0), filters.size(1), filters.size(2), step};
  if (step < 1 || s.height % step != 0 || s.width % step != 0)
    fail(op, "step is " + std::to_string(step) + "; it must divide the sides of filters " + shape_text(filters));
  return s;
}

inline FilterSizes check_filter(const Tensor& spectrum, const Tensor& filters, int64_t step) {
  constexpr const char* op = "scattering_filter";
  check_float_or_double(op, "spectrum", spectrum);
  check_dim(op, "spectrum", spectrum, 4, "[P, H, W / 2 + 1, 2]");
  const FilterSizes s = check_filters(op, filters, spectrum.size(0), step);
  check_beside(op, "filters", filters, "spectrum", spectrum);
  check_shape(op, "spectrum", spectrum, {s.planes, s.height, s.half(), 2}, "[P, H, W / 2 + 1, 2] with filters' sizes");
  return s;
}

inline FilterSizes check_filter_adjoint(const Tensor& gradient, const Tensor& filters, int64_t step) {
  constexpr const char* op = "scattering_filter_adjoint";
  check_float_or_double(op, "gradient", gradient);
  check_dim(op, "gradient", gradient, 5, "[P, F, H / step, W / step, 2]");
  const FilterSizes s = check_filters(op, filters, gradient.size(0), step);
  check_beside(op, "filters", filters, "gradient", gradient);
  check_shape(op, "gradient", gradient, {s.planes, s.filters, s.out_height(), s.out_width(), 2},
              "[P, F, H / step, W / step, 2] with filters' sizes");
  return s;
}

// The low-pass filter along one dimension: out[i] = sum over t of taps[t] * in[(i + 1) * step + t - middle], circular.
template <class T>
struct Line {
  const T* taps;
  int64_t count, middle, size, step;

  COG_RWKV_BOTH int64_t outputs() const { return size / step - 2; }
};

struct LowSizes {
  int64_t planes, height, width, step;
};

inline void check_line(const char* op, const char* name, const Tensor& taps, int64_t middle, int64_t size,
                       int64_t step) {
  check_float_or_double(op, name, taps);
  check_dim(op, name, taps, 1, "[taps]");
  if (taps.size(0) > size || middle < 0 || middle >= taps.size(0))
    fail(op, std::string(name) + " has shape " + shape_text(taps) + "; there are at most " + std::to_string(size) +
                 " taps, and their middle is one of them");
  if (step < 1 || size % step != 0 || size / step < 2)
    fail(op, "step is " + std::to_string(step) + "; it must divide each side, twice at least");
}

template <class T>
Line<T> line_of(const Tensor& taps, int64_t middle, int64_t size, int64_t step) {
  return {data<T>(taps), taps.size(0), middle, size, step};
}

inline LowSizes check_low(const Tensor& signals, const Tensor& rows, const Tensor& columns, int64_t row_middle,
                          int64_t column_middle, int64_t step) {
  constexpr const char* op = "scattering_low";
  check_float_or_double(op, "signals", signals);
  const bool ok = signals.dim() == 3 || (signals.dim() == 4 && signals.size(3) == 2);
  if (!ok) fail(op, "signals has shape " + shape_text(signals) + "; it must be [P, H, W] or [P, H, W, 2]");
  check_line(op, "rows", rows, row_middle, signals.size(1), step);
  check_line(op, "columns", columns, column_middle, signals.size(2), step);
  check_beside(op, "rows", rows, "signals", signals);
  check_beside(op, "columns", columns, "signals", signals);
  return {signals.size(0), signals.size(1), signals.size(2), step};
}

inline LowSizes check_low_adjoint(const Tensor& gradient, const Tensor& rows, const Tensor& columns, int64_t row_middle,
                                  int64_t column_middle, const LowSizes& s, const MaybeTensor& z,
                                  const MaybeTensor& more) {
  constexpr const char* op = "scattering_low_adjoint";
  check_planes(op, "gradient", gradient);
  check_line(op, "rows", rows, row_middle, s.height, s.step);
  check_line(op, "columns", columns, column_middle, s.width, s.step);
  check_beside(op, "rows", rows, "gradient", gradient);
  check_beside(op, "columns", columns, "gradient", gradient);
  check_shape(op, "gradient", gradient, {s.planes, s.height / s.step - 2, s.width / s.step - 2},
              "[P, H / step - 2, W / step - 2]");
  if (z) {
    check_beside(op, "z", *z, "gradient", gradient);
    check_shape(op, "z", *z, {s.planes, s.height, s.width, 2}, "[P, H, W, 2]");
  }
  if (more) {
    check_beside(op, "more", *more, "gradient", gradient);
    check_shape(op, "more", *more, {s.planes, s.height, s.width}, "[P, H, W]");
  }
  return s;
}

inline void check_modulus(const Tensor& z) {
  check_float_or_double("scattering_modulus", "z", z);
  if (z.dim() < 1 || z.size(z.dim() - 1) != 2)
    fail("scattering_modulus", "z has shape " + shape_text(z) + "; it must be [..., 2]");
}

}  // namespace cog_rwkv

// The parts of scattering2d: schemas and CPU kernels.
#include "scattering2d.h"

#include "../csrc/tensor.h"
#include "kernel.h"

namespace cog_rwkv {
namespace {

// body(plane, buffer) for every plane, over the threads; each has a buffer of `room` values of its own.
template <class T, class Body>
void each_plane(int64_t planes, int64_t room, const Body& body) {
  parallel_for(planes, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> buffer(room);
    for (int64_t p = begin; p < end; p++) best_cpu([&] { body(p, buffer.data()); });
  });
}

// Where element i of a line of `padded` comes from in one of `size`.
std::vector<int64_t> mirrored(int64_t size, int64_t padded) {
  std::vector<int64_t> places(padded);
  const int64_t period = 2 * (size - 1);
  for (int64_t i = 0; i < padded; i++) {
    const int64_t place = (i - (padded - size) / 2 + 2 * period) % period;
    places[i] = std::min(place, period - place);
  }
  return places;
}

Tensor pad_cpu(const Tensor& x, int64_t height, int64_t width) {
  constexpr const char* op = "scattering_pad";
  check_planes(op, "x", x);
  check_pad(op, x.size(1), height);
  check_pad(op, x.size(2), width);
  const Tensor in = as_contiguous(x);
  const int64_t planes = x.size(0), m_size = x.size(1), n_size = x.size(2);
  Tensor out = empty_tensor(x, {planes, height, width});
  const auto rows = mirrored(m_size, height), columns = mirrored(n_size, width);
  dispatch_float_or_double(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    each_plane<T>(planes, 0, [&](int64_t p, T*) {
      for (int64_t i = 0; i < height; i++) {
        const T* from = data<T>(in) + (p * m_size + rows[i]) * n_size;
        T* to = mutable_data<T>(out) + (p * height + i) * width;
        for (int64_t j = 0; j < width; j++) to[j] = from[columns[j]];
      }
    });
  });
  return out;
}

Tensor pad_adjoint_cpu(const Tensor& gradient, int64_t m_size, int64_t n_size) {
  constexpr const char* op = "scattering_pad_adjoint";
  check_planes(op, "gradient", gradient);
  const int64_t planes = gradient.size(0), height = gradient.size(1), width = gradient.size(2);
  check_pad(op, m_size, height);
  check_pad(op, n_size, width);
  const Tensor in = as_contiguous(gradient);
  Tensor out = empty_tensor(gradient, {planes, m_size, n_size});
  const auto rows = mirrored(m_size, height), columns = mirrored(n_size, width);
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    each_plane<T>(planes, 0, [&](int64_t p, T*) {
      T* to = mutable_data<T>(out) + p * m_size * n_size;
      std::fill_n(to, m_size * n_size, T{0});
      for (int64_t i = 0; i < height; i++) {
        const T* from = data<T>(in) + (p * height + i) * width;
        for (int64_t j = 0; j < width; j++) to[rows[i] * n_size + columns[j]] += from[j];
      }
    });
  });
  return out;
}

Tensor filter_cpu(const Tensor& spectrum, const Tensor& filters, int64_t step) {
  const FilterSizes s = check_filter(spectrum, filters, step);
  const Tensor in = as_contiguous(spectrum), psi = as_contiguous(filters);
  Tensor out = empty_tensor(spectrum, {s.planes, s.filters, s.out_height(), s.out_width(), 2});
  dispatch_float_or_double(spectrum.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    each_plane<T>(s.planes, 2 * (s.step + 1) * s.width, [&](int64_t p, T* buffer) {
      filter_plane(data<T>(in) + p * s.height * s.half() * 2, data<T>(psi), s,
                   mutable_data<T>(out) + p * s.filters * s.out_height() * s.out_width() * 2, buffer);
    });
  });
  return out;
}

Tensor filter_adjoint_cpu(const Tensor& gradient, const Tensor& filters, int64_t step) {
  const FilterSizes s = check_filter_adjoint(gradient, filters, step);
  const Tensor in = as_contiguous(gradient), psi = as_contiguous(filters);
  Tensor out = empty_tensor(gradient, {s.planes, s.height, s.half(), 2});
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    each_plane<T>(s.planes, 2 * s.height * s.width, [&](int64_t p, T* buffer) {
      filter_adjoint_plane(data<T>(in) + p * s.filters * s.out_height() * s.out_width() * 2, data<T>(psi), s,
                           mutable_data<T>(out) + p * s.height * s.half() * 2, buffer);
    });
  });
  return out;
}

Tensor modulus_cpu(const Tensor& z) {
  check_modulus(z);
  const Tensor in = as_contiguous(z);
  Tensor out = empty_tensor(z, z.sizes().slice(0, z.dim() - 1));
  dispatch_float_or_double(z.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(out.numel(), 16384, [&](int64_t begin, int64_t end) {
      best_cpu([&] { modulus_range(data<T>(in) + 2 * begin, end - begin, mutable_data<T>(out) + begin); });
    });
  });
  return out;
}

Tensor low_cpu(const Tensor& signals, const Tensor& rows, const Tensor& columns, int64_t row_middle,
               int64_t column_middle, int64_t step) {
  const LowSizes s = check_low(signals, rows, columns, row_middle, column_middle, step);
  const bool complex = signals.dim() == 4;
  const Tensor in = as_contiguous(signals), row_taps = as_contiguous(rows), column_taps = as_contiguous(columns);
  const int64_t h = s.height / step - 2, w = s.width / step - 2, size = s.height * s.width;
  Tensor out = empty_tensor(signals, {s.planes, h, w});
  if (h * w == 0) return out;
  dispatch_float_or_double(signals.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto across = line_of<T>(row_taps, row_middle, s.height, step);
    const auto along = line_of<T>(column_taps, column_middle, s.width, step);
    each_plane<T>(s.planes, h * (2 * s.width + 1) + size, [&](int64_t p, T* buffer) {
      const T* u = data<T>(in) + p * size * (complex ? 2 : 1);
      T* moduli = buffer + h * (2 * s.width + 1);
      if (complex) modulus_range(u, size, moduli);
      low_plane(complex ? moduli : u, across, along, mutable_data<T>(out) + p * h * w, buffer);
    });
  });
  return out;
}

Tensor low_adjoint_cpu(const Tensor& gradient, const Tensor& rows, const Tensor& columns, int64_t row_middle,
                       int64_t column_middle, int64_t step, int64_t height, int64_t width, const MaybeTensor& z,
                       const MaybeTensor& more) {
  const LowSizes s = check_low_adjoint(gradient, rows, columns, row_middle, column_middle,
                                       {gradient.size(0), height, width, step}, z, more);
  const Tensor in = as_contiguous(gradient), row_taps = as_contiguous(rows), column_taps = as_contiguous(columns);
  const MaybeTensor signals = z ? MaybeTensor(as_contiguous(*z)) : z;
  const MaybeTensor other = more ? MaybeTensor(as_contiguous(*more)) : more;
  const int64_t h = gradient.size(1), w = gradient.size(2), size = height * width;
  Tensor out =
      z ? empty_tensor(gradient, {s.planes, height, width, 2}) : empty_tensor(gradient, {s.planes, height, width});
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto row_matrix = dense(line_of<T>(row_taps, row_middle, height, step));
    const auto column_matrix = dense(line_of<T>(column_taps, column_middle, width, step));
    each_plane<T>(s.planes, h * width + size, [&](int64_t p, T* buffer) {
      T* to = mutable_data<T>(out) + p * size * (z ? 2 : 1);
      T* u = z ? buffer + h * width : to;
      low_adjoint_plane(data<T>(in) + p * h * w, row_matrix.data(), column_matrix.data(), h, w, height, width, u,
                        buffer);
      const T* add = other ? data<T>(*other) + p * size : nullptr;
      if (z) modulus_adjoint_range(u, add, data<T>(*signals) + 2 * p * size, size, to);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("scattering_pad(Tensor x, int height, int width) -> Tensor");
  m.def("scattering_pad_adjoint(Tensor gradient, int height, int width) -> Tensor");
  m.def("scattering_filter(Tensor spectrum, Tensor filters, int step) -> Tensor");
  m.def("scattering_filter_adjoint(Tensor gradient, Tensor filters, int step) -> Tensor");
  m.def("scattering_modulus(Tensor z) -> Tensor");
  m.def(
      "scattering_low(Tensor signals, Tensor rows, Tensor columns, int row_middle, int column_middle, int step) "
      "-> Tensor");
  m.def(
      "scattering_low_adjoint(Tensor gradient, Tensor rows, Tensor columns, int row_middle, int column_middle, "
      "int step, int height, int width, Tensor? z, Tensor? more) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("scattering_pad", TORCH_BOX(&pad_cpu));
  m.impl("scattering_pad_adjoint", TORCH_BOX(&pad_adjoint_cpu));
  m.impl("scattering_filter", TORCH_BOX(&filter_cpu));
  m.impl("scattering_filter_adjoint", TORCH_BOX(&filter_adjoint_cpu));
  m.impl("scattering_modulus", TORCH_BOX(&modulus_cpu));
  m.impl("scattering_low", TORCH_BOX(&low_cpu));
  m.impl("scattering_low_adjoint", TORCH_BOX(&low_adjoint_cpu));
}

}  // namespace cog_rwkv

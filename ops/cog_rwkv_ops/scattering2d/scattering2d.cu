// The parts of scattering2d: CUDA launches.
#include "kernel.cuh"

#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

constexpr int kThreads = 256;

Tensor pad_cuda(const Tensor& x, int64_t height, int64_t width) {
  constexpr const char* op = "scattering_pad";
  check_planes(op, "x", x);
  check_pad(op, x.size(1), height);
  check_pad(op, x.size(2), width);
  const Launch launch(op, x);
  const Tensor in = as_contiguous(x);
  Tensor out = empty_tensor(x, {x.size(0), height, width});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    pad_kernel<<<blocks(out.numel(), kThreads), kThreads, 0, launch.stream>>>(
        data<T>(in), mutable_data<T>(out), x.size(0), x.size(1), x.size(2), height, width);
    launch.check();
  });
  return out;
}

Tensor pad_adjoint_cuda(const Tensor& gradient, int64_t m_size, int64_t n_size) {
  constexpr const char* op = "scattering_pad_adjoint";
  check_planes(op, "gradient", gradient);
  check_pad(op, m_size, gradient.size(1));
  check_pad(op, n_size, gradient.size(2));
  const Launch launch(op, gradient);
  const Tensor in = as_contiguous(gradient);
  Tensor out = empty_tensor(gradient, {gradient.size(0), m_size, n_size});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    pad_adjoint_kernel<<<blocks(out.numel(), kThreads), kThreads, 0, launch.stream>>>(
        data<T>(in), mutable_data<T>(out), gradient.size(0), m_size, n_size, gradient.size(1), gradient.size(2));
    launch.check();
  });
  return out;
}

Tensor filter_cuda(const Tensor& spectrum, const Tensor& filters, int64_t step) {
  const FilterSizes s = check_filter(spectrum, filters, step);
  const Launch launch("scattering_filter", spectrum);
  const Tensor in = as_contiguous(spectrum), psi = as_contiguous(filters);
  Tensor out = empty_tensor(spectrum, {s.planes, s.filters, s.out_height(), s.out_width(), 2});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(spectrum.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int planes = sizeof(T) == 4 ? 4 : 2, filters_at_once = 8;
    const int64_t groups = (s.planes + planes - 1) / planes * ((s.filters + filters_at_once - 1) / filters_at_once);
    const int64_t count = groups * s.out_height() * s.out_width();
    filter_kernel<planes, filters_at_once><<<blocks(count, kThreads), kThreads, 0, launch.stream>>>(
        data<T>(in), data<T>(psi), mutable_data<T>(out), s, count);
    launch.check();
  });
  return out;
}

Tensor filter_adjoint_cuda(const Tensor& gradient, const Tensor& filters, int64_t step) {
  const FilterSizes s = check_filter_adjoint(gradient, filters, step);
  const Launch launch("scattering_filter_adjoint", gradient);
  const Tensor in = as_contiguous(gradient), psi = as_contiguous(filters);
  Tensor out = empty_tensor(gradient, {s.planes, s.height, s.half(), 2});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int planes = sizeof(T) == 4 ? 4 : 2;
    const int64_t count = (s.planes + planes - 1) / planes * s.height * s.half();
    filter_adjoint_kernel<planes><<<blocks(count, kThreads), kThreads, 0, launch.stream>>>(
        data<T>(in), data<T>(psi), mutable_data<T>(out), s, count);
    launch.check();
  });
  return out;
}

Tensor modulus_cuda(const Tensor& z) {
  check_modulus(z);
  const Launch launch("scattering_modulus", z);
  const Tensor in = as_contiguous(z);
  Tensor out = empty_tensor(z, z.sizes().slice(0, z.dim() - 1));
  if (out.numel() == 0) return out;
  dispatch_float_or_double(z.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    modulus_kernel<<<blocks(out.numel(), kThreads), kThreads, 0, launch.stream>>>(data<T>(in), mutable_data<T>(out),
                                                                                  out.numel());
    launch.check();
  });
  return out;
}

// Lets a kernel use `bytes` of shared memory; names the side that is too long.
template <class Kernel>
void allow_shared(const char* op, Kernel kernel, size_t bytes, int64_t width) {
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  int most = 0;
  check_cuda(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (bytes > static_cast<size_t>(most))
    fail(op, "images " + std::to_string(width) + " wide need " + std::to_string(bytes) +
                 " bytes of shared memory; this GPU has " + std::to_string(most));
  if (bytes > (48 << 10))
    check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

Tensor low_cuda(const Tensor& signals, const Tensor& rows, const Tensor& columns, int64_t row_middle,
                int64_t column_middle, int64_t step) {
  constexpr const char* op = "scattering_low";
  const LowSizes s = check_low(signals, rows, columns, row_middle, column_middle, step);
  const bool complex = signals.dim() == 4;
  const Launch launch(op, signals);
  const Tensor in = as_contiguous(signals), row_taps = as_contiguous(rows), column_taps = as_contiguous(columns);
  Tensor out = empty_tensor(signals, {s.planes, s.height / step - 2, s.width / step - 2});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(signals.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto across = line_of<T>(row_taps, row_middle, s.height, step);
    const auto along = line_of<T>(column_taps, column_middle, s.width, step);
    const LowWork work = low_work(s, across, along, kThreads);
    const size_t bytes = work.shared(across, along) * sizeof(T);
    const auto launch_kernel = [&](auto kernel) {
      allow_shared(op, kernel, bytes, s.width);
      kernel<<<blocks(work.blocks, 1), kThreads, bytes, launch.stream>>>(data<T>(in), across, along,
                                                                         mutable_data<T>(out), s, work);
    };
    complex ? launch_kernel(low_kernel<T, true>) : launch_kernel(low_kernel<T, false>);
    launch.check();
  });
  return out;
}

Tensor low_adjoint_cuda(const Tensor& gradient, const Tensor& rows, const Tensor& columns, int64_t row_middle,
                        int64_t column_middle, int64_t step, int64_t height, int64_t width, const MaybeTensor& z,
                        const MaybeTensor& more) {
  constexpr const char* op = "scattering_low_adjoint";
  const LowSizes s = check_low_adjoint(gradient, rows, columns, row_middle, column_middle,
                                       {gradient.size(0), height, width, step}, z, more);
  const Launch launch(op, gradient);
  const Tensor in = as_contiguous(gradient), row_taps = as_contiguous(rows), column_taps = as_contiguous(columns);
  const MaybeTensor signals = z ? MaybeTensor(as_contiguous(*z)) : z;
  const MaybeTensor other = more ? MaybeTensor(as_contiguous(*more)) : more;
  Tensor out =
      z ? empty_tensor(gradient, {s.planes, height, width, 2}) : empty_tensor(gradient, {s.planes, height, width});
  if (out.numel() == 0) return out;
  dispatch_float_or_double(gradient.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto across = line_of<T>(row_taps, row_middle, height, step);
    const auto along = line_of<T>(column_taps, column_middle, width, step);
    const size_t bytes = (height + width + kAdjointRows * along.outputs()) * sizeof(T);
    allow_shared(op, low_adjoint_kernel<T>, bytes, width);
    const int64_t strips = (height + kAdjointRows - 1) / kAdjointRows;
    low_adjoint_kernel<<<blocks(s.planes * strips, 1), kThreads, bytes, launch.stream>>>(
        data<T>(in), across, along, z ? data<T>(*signals) : nullptr, other ? data<T>(*other) : nullptr,
        mutable_data<T>(out), s, strips);
    launch.check();
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("scattering_pad", TORCH_BOX(&pad_cuda));
  m.impl("scattering_pad_adjoint", TORCH_BOX(&pad_adjoint_cuda));
  m.impl("scattering_filter", TORCH_BOX(&filter_cuda));
  m.impl("scattering_filter_adjoint", TORCH_BOX(&filter_adjoint_cuda));
  m.impl("scattering_modulus", TORCH_BOX(&modulus_cuda));
  m.impl("scattering_low", TORCH_BOX(&low_cuda));
  m.impl("scattering_low_adjoint", TORCH_BOX(&low_adjoint_cuda));
}

}  // namespace cog_rwkv

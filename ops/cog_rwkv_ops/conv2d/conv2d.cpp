// conv2d and its gradients: schemas and CPU kernels.
#include "conv2d.h"

#include "args.h"
#define COG_RWKV_KERNELS "../conv2d/kernel.h"
#include <vector>

#include "../csrc/each_cpu.h"
#include "../csrc/floats.h"

namespace cog_rwkv {
namespace {

// The weights of channels o to o + 32 of a group, at each tap of a gather: [taps][depth][32], zeros beyond the last.
void pack_panel(const Gather<float>& a, int64_t group, int64_t o, float* panel) {
  const int64_t count = std::min<int64_t>(32, a.width - o);
  for (int i = 0; i < a.h.taps; i++) {
    for (int j = 0; j < a.w.taps; j++) {
      const int64_t r = a.h.weight_first + i * a.h.weight_step, s = a.w.weight_first + j * a.w.weight_step;
      for (int64_t d = 0; d < a.depth; d++, panel += 32) {
        for (int64_t c = 0; c < 32; c++) panel[c] = c < count ? a.weight[a.weight_at(group, d, o + c, r, s)] : 0.0f;
      }
    }
  }
}

// One panel of 32 channels after the other, its places over the threads.
void run_gather(const Gather<float>& a) {
  const auto block = COG_RWKV_KERNEL(gather_block);
  const int64_t step = COG_RWKV_KERNEL(pixels_at_once)(), taps = int64_t{a.h.taps} * a.w.taps;
  const int64_t tiles = (a.places() + step - 1) / step;
  const auto panel = scratch(taps * a.depth * 32);
  const std::vector<float> zeros(a.depth, 0.0f);
  const int64_t grain = 1 + 60000 / (1 + step * taps * a.depth * 32);
  for (int64_t group = 0; group < a.groups; group++) {
    for (int64_t o = 0; o < a.width; o += 32) {
      pack_panel(a, group, o, panel.get());
      parallel_for(tiles, grain, [&](int64_t begin, int64_t end) {
        block(a, group, o, panel.get(), zeros.data(), begin * step, std::min(end * step, a.places()));
      });
    }
  }
}

// The same in double, for checks of gradients: one product after the other.
void run_gather(const Gather<double>& a) {
  parallel_for(a.places() * a.groups * a.width, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t o = i % a.width, group = i / a.width % a.groups, place = i / (a.width * a.groups);
      const int64_t x = place % a.w.size, y = place / a.w.size % a.h.size, n = place / a.w.size / a.h.size;
      double sum = a.bias == nullptr ? 0.0 : a.bias[group * a.width + o];
      for (int t = 0; t < a.h.taps * a.w.taps; t++) {
        const int ti = t / a.w.taps, tj = t % a.w.taps;
        const int64_t row = y * a.h.step + a.h.first + ti * a.h.tap_step;
        const int64_t column = x * a.w.step + a.w.first + tj * a.w.tap_step;
        if (row < 0 || row >= a.h.in_size || column < 0 || column >= a.w.in_size) continue;
        const double* from = a.in + (((n * a.h.in_size + row) * a.w.in_size + column) * a.groups + group) * a.depth;
        const int64_t r = a.h.weight_first + ti * a.h.weight_step, s = a.w.weight_first + tj * a.w.weight_step;
        for (int64_t d = 0; d < a.depth; d++) sum += from[d] * a.weight[a.weight_at(group, d, o, r, s)];
      }
      const int64_t row = y * a.h.out_step + a.h.out_first, column = x * a.w.out_step + a.w.out_first;
      a.out[(((n * a.h.out_size + row) * a.w.out_size + column) * a.groups + group) * a.width + o] = sum;
    }
  });
}

// The outputs along one dimension that read inside of `size`, for each place of the kernel: all firsts, all lasts.
std::vector<int64_t> reach(int64_t size, int64_t kernel, int64_t outputs, const Window& w) {
  std::vector<int64_t> ends(2 * kernel);
  for (int64_t r = 0; r < kernel; r++) {
    const int64_t shift = w.padding - r * w.dilation;  // output p reads p * stride - shift
    ends[r] = shift > 0 ? std::min((shift + w.stride - 1) / w.stride, outputs) : 0;
    ends[kernel + r] = std::clamp<int64_t>(size + shift > 0 ? (size + shift - 1) / w.stride + 1 : 0, ends[r], outputs);
  }
  return ends;
}

void run_weight(const ConvSizes& z, const float* gradient, const float* x, float* out) {
  const auto rows = reach(z.h, z.r, z.p, z.rows), columns = reach(z.w, z.s, z.q, z.columns);
  const WeightArgs args{&z, gradient, x, out, {rows.data(), rows.data() + z.r}, {columns.data(), columns.data() + z.s}};
  const auto kernel = COG_RWKV_KERNEL(weight_rows);
  const int64_t step = COG_RWKV_KERNEL(pixels_at_once)(), tiles = (z.k_group() + step - 1) / step;
  parallel_for(z.groups * tiles * z.r * z.s, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t s = i % z.s, r = i / z.s % z.r, tile = i / (z.s * z.r) % tiles, group = i / (z.s * z.r * tiles);
      const int64_t k = group * z.k_group() + tile * step;
      kernel(args, k, static_cast<int>(std::min(step, (group + 1) * z.k_group() - k)), r, s);
    }
  });
}

void run_weight(const ConvSizes& z, const double* gradient, const double* x, double* out) {
  const auto rows = reach(z.h, z.r, z.p, z.rows), columns = reach(z.w, z.s, z.q, z.columns);
  parallel_for(z.k * z.r * z.s * z.c_group(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t c = i % z.c_group(), s = i / z.c_group() % z.s, r = i / (z.c_group() * z.s) % z.r;
      const int64_t k = i / (z.c_group() * z.s * z.r), channel = k / z.k_group() * z.c_group() + c;
      double sum = 0.0;
      for (int64_t n = 0; n < z.n; n++) {
        for (int64_t p = rows[r]; p < rows[z.r + r]; p++) {
          for (int64_t q = columns[s]; q < columns[z.s + s]; q++) {
            const int64_t row = p * z.rows.stride - z.rows.padding + r * z.rows.dilation;
            const int64_t column = q * z.columns.stride - z.columns.padding + s * z.columns.dilation;
            sum += gradient[((n * z.p + p) * z.q + q) * z.k + k] * x[((n * z.h + row) * z.w + column) * z.c + channel];
          }
        }
      }
      out[i] = sum;
    }
  });
}

Tensor conv2d_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t stride_h,
                  int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h, int64_t dilation_w,
                  int64_t groups) {
  const ConvSizes z =
      check_conv(x, weight, bias, {stride_h, padding_h, dilation_h}, {stride_w, padding_w, dilation_w}, groups);
  const Tensor in = as_nhwc(x), matrix = as_nhwc(weight);
  const std::optional<Tensor> add = bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  Tensor out = empty_tensor(x, {z.n, z.p, z.q, z.k});
  if (out.numel() > 0 && x.scalar_type() == ScalarType::Double) {
    run_gather(forward_gather<double>(z, data<double>(in), data<double>(matrix), add ? data<double>(*add) : nullptr,
                                      mutable_data<double>(out)));
  } else if (out.numel() > 0) {
    const Floats values(in), weights(matrix);
    const std::optional<Floats> biases = add ? std::optional<Floats>(std::in_place, *add) : std::nullopt;
    FloatsOut result(out);
    run_gather(forward_gather<float>(z, values.get(), weights.get(), biases ? biases->get() : nullptr, result.get()));
    result.write();
  }
  return from_nhwc(out, is_channels_last(x));
}

Tensor input_gradient_cpu(const Tensor& gradient, const Tensor& weight, int64_t height, int64_t width, int64_t stride_h,
                          int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h,
                          int64_t dilation_w, int64_t groups, bool channels_last) {
  const ConvSizes z = check_input_gradient(gradient, weight, height, width, {stride_h, padding_h, dilation_h},
                                           {stride_w, padding_w, dilation_w}, groups);
  const Tensor in = as_nhwc(gradient), matrix = as_nhwc(weight);
  Tensor out = empty_tensor(gradient, {z.n, z.h, z.w, z.c});
  if (out.numel() > 0 && gradient.scalar_type() == ScalarType::Double) {
    backward_gathers<double>(z, data<double>(in), data<double>(matrix), mutable_data<double>(out),
                             [](const auto& gather) { run_gather(gather); });
  } else if (out.numel() > 0) {
    const Floats values(in), weights(matrix);
    FloatsOut result(out);
    backward_gathers<float>(z, values.get(), weights.get(), result.get(),
                            [](const auto& gather) { run_gather(gather); });
    result.write();
  }
  return from_nhwc(out, channels_last);
}

Tensor weight_gradient_cpu(const Tensor& gradient, const Tensor& x, int64_t kernel_h, int64_t kernel_w,
                           int64_t stride_h, int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h,
                           int64_t dilation_w, int64_t groups, bool channels_last) {
  const ConvSizes z = check_weight_gradient(gradient, x, kernel_h, kernel_w, {stride_h, padding_h, dilation_h},
                                            {stride_w, padding_w, dilation_w}, groups);
  const Tensor from = as_nhwc(gradient), in = as_nhwc(x);
  Tensor out = empty_tensor(x, {z.k, z.r, z.s, z.c_group()});
  if (out.numel() > 0 && x.scalar_type() == ScalarType::Double) {
    run_weight(z, data<double>(from), data<double>(in), mutable_data<double>(out));
  } else if (out.numel() > 0) {
    const Floats gradients(from), values(in);
    FloatsOut result(out);
    run_weight(z, gradients.get(), values.get(), result.get());
    result.write();
  }
  return from_nhwc(out, channels_last);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "conv2d(Tensor x, Tensor weight, Tensor? bias, int stride_h, int stride_w, int padding_h, int padding_w, "
      "int dilation_h, int dilation_w, int groups) -> Tensor");
  m.def(
      "conv2d_input_gradient(Tensor gradient, Tensor weight, int height, int width, int stride_h, int stride_w, "
      "int padding_h, int padding_w, int dilation_h, int dilation_w, int groups, bool channels_last) -> Tensor");
  m.def(
      "conv2d_weight_gradient(Tensor gradient, Tensor x, int kernel_h, int kernel_w, int stride_h, int stride_w, "
      "int padding_h, int padding_w, int dilation_h, int dilation_w, int groups, bool channels_last) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("conv2d", TORCH_BOX(&conv2d_cpu));
  m.impl("conv2d_input_gradient", TORCH_BOX(&input_gradient_cpu));
  m.impl("conv2d_weight_gradient", TORCH_BOX(&weight_gradient_cpu));
}

}  // namespace cog_rwkv

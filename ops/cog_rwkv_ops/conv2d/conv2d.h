// conv2d: sizes and checks, the same on every device.
//
// Inside, images are NHWC and weights [K, R, S, C / groups], contiguous: both of what PyTorch calls channels_last.
//
// The output and the gradient of the input are one computation, "gather": a grid of places of the result, each a sum
// over taps of a pixel of `in` times a matrix. For the gradient of the input with a stride, the places that share
// their remainder by the stride share their taps: one grid for each remainder.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <numeric>
#include <optional>

#include "../csrc/beside.h"
#include "../csrc/dtype.h"
#include "../csrc/math.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {

struct Window {
  int64_t stride, padding, dilation;
};

struct ConvSizes {
  int64_t n, c, h, w, k, r, s, p, q, groups;
  Window rows, columns;

  COG_RWKV_BOTH int64_t c_group() const { return c / groups; }
  COG_RWKV_BOTH int64_t k_group() const { return k / groups; }
};

inline int64_t conv_outputs(int64_t size, int64_t kernel, const Window& window) {
  const int64_t room = size + 2 * window.padding - window.dilation * (kernel - 1) - 1;
  return room < 0 ? -1 : room / window.stride + 1;
}

inline void check_window(const char* op, const char* which, const Window& window) {
  const auto say = [&](const char* name, int64_t value, const char* least) {
    fail(op,
         std::string(name) + " is " + std::to_string(value) + " along the " + which + "; it must be at least " + least);
  };
  if (window.stride < 1) say("stride", window.stride, "1");
  if (window.padding < 0) say("padding", window.padding, "0");
  if (window.dilation < 1) say("dilation", window.dilation, "1");
}

// From x [N, C, H, W] and weight [K, C / groups, R, S], given by their sizes.
inline ConvSizes conv_sizes(const char* op, std::array<int64_t, 4> x, std::array<int64_t, 4> weight, const Window& rows,
                            const Window& columns, int64_t groups) {
  check_window(op, "rows", rows);
  check_window(op, "columns", columns);
  if (groups < 1 || weight[0] % groups != 0)
    fail(op,
         "groups is " + std::to_string(groups) + "; it must divide weight's " + std::to_string(weight[0]) + " outputs");
  if (x[1] != weight[1] * groups)
    fail(op, "x has " + std::to_string(x[1]) + " channels; weight takes " + std::to_string(weight[1]) + " in each of " +
                 std::to_string(groups) + " groups");
  ConvSizes z{x[0], x[1], x[2], x[3], weight[0], weight[2], weight[3], 0, 0, groups, rows, columns};
  if (z.r < 1 || z.s < 1) fail(op, "weight has a kernel without places");
  z.p = conv_outputs(z.h, z.r, rows);
  z.q = conv_outputs(z.w, z.s, columns);
  if (z.p < 0 || z.q < 0) fail(op, "weight has a kernel larger than the padded x");
  return z;
}

inline std::array<int64_t, 4> sizes4(const char* op, const char* name, const Tensor& t) {
  check_floating(op, name, t);
  check_dim(op, name, t, 4, "of four dimensions");
  return {t.size(0), t.size(1), t.size(2), t.size(3)};
}

inline ConvSizes check_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                            const Window& rows, const Window& columns, int64_t groups) {
  constexpr const char* op = "conv2d";
  const ConvSizes z = conv_sizes(op, sizes4(op, "x", x), sizes4(op, "weight", weight), rows, columns, groups);
  check_beside(op, "weight", weight, "x", x);
  if (bias) {
    check_beside(op, "bias", *bias, "x", x);
    check_shape(op, "bias", *bias, {z.k}, "[K]");
  }
  return z;
}

// For the gradient of x [N, C, height, width], from that of the output [N, K, P, Q].
inline ConvSizes check_input_gradient(const Tensor& gradient, const Tensor& weight, int64_t height, int64_t width,
                                      const Window& rows, const Window& columns, int64_t groups) {
  constexpr const char* op = "conv2d_input_gradient";
  const auto given = sizes4(op, "gradient", gradient), kernel = sizes4(op, "weight", weight);
  const ConvSizes z = conv_sizes(op, {given[0], kernel[1] * groups, height, width}, kernel, rows, columns, groups);
  check_beside(op, "weight", weight, "gradient", gradient);
  check_shape(op, "gradient", gradient, {z.n, z.k, z.p, z.q}, "[N, K, P, Q]");
  return z;
}

// For the gradient of weight [K, C / groups, kernel_h, kernel_w].
inline ConvSizes check_weight_gradient(const Tensor& gradient, const Tensor& x, int64_t kernel_h, int64_t kernel_w,
                                       const Window& rows, const Window& columns, int64_t groups) {
  constexpr const char* op = "conv2d_weight_gradient";
  const auto given = sizes4(op, "gradient", gradient), image = sizes4(op, "x", x);
  const int64_t inputs = groups < 1 ? 0 : image[1] / groups;
  const ConvSizes z = conv_sizes(op, image, {given[1], inputs, kernel_h, kernel_w}, rows, columns, groups);
  check_beside(op, "gradient", gradient, "x", x);
  check_shape(op, "gradient", gradient, {z.n, z.k, z.p, z.q}, "[N, K, P, Q]");
  return z;
}

// [N, C, H, W] -> a view [N, H, W, C], and back.
inline Tensor channels_behind(const Tensor& t) {
  return torch::stable::transpose(torch::stable::transpose(t, 1, 2), 2, 3);
}
inline Tensor channels_before(const Tensor& t) {
  return torch::stable::transpose(torch::stable::transpose(t, 2, 3), 1, 2);
}
inline Tensor as_nhwc(const Tensor& t) { return as_contiguous(channels_behind(t)); }
// [N, C, H, W] from a contiguous [N, H, W, C]: a view where the result is to be channels_last, else a copy.
inline Tensor from_nhwc(const Tensor& t, bool channels_last) {
  const Tensor view = channels_before(t);
  return channels_last ? view : torch::stable::contiguous(view);
}

// Whether results are channels_last: where x is, and not contiguous in the usual order as well.
inline bool is_channels_last(const Tensor& t) { return !t.is_contiguous() && channels_behind(t).is_contiguous(); }

// One dimension of a gather. Place i of the grid reads, at tap t, row i * step + first + t * tap_step of `in` with the
// weight's row weight_first + t * weight_step, and is row i * out_step + out_first of `out`.
struct Axis {
  int taps, step, first, tap_step, weight_first, weight_step;
  int size, out_step, out_first;
  int in_size, out_size, kernel;
};

inline Axis forward_axis(int64_t in, int64_t kernel, int64_t out, const Window& w) {
  const auto i = [](int64_t value) { return static_cast<int>(value); };
  return {i(kernel), i(w.stride), i(-w.padding), i(w.dilation), 0, 1, i(out), 1, 0, i(in), i(out), i(kernel)};
}

// For the gradient of the input: its places with remainder `rest` by the stride. `in` is the gradient of the output.
inline Axis backward_axis(int64_t in, int64_t kernel, int64_t out, const Window& w, int64_t rest) {
  const int64_t each = w.stride / std::gcd(w.stride, w.dilation);
  int64_t start = 0;
  while (start < each && (rest + w.padding - start * w.dilation) % w.stride != 0) start++;
  const bool any = start < each && start < kernel;
  const auto i = [](int64_t value) { return static_cast<int>(value); };
  return {any ? i((kernel - 1 - start) / each + 1) : 0,
          1,
          any ? i((rest + w.padding - start * w.dilation) / w.stride) : 0,
          i(-each * w.dilation / w.stride),
          i(start),
          i(each),
          i(rest < out ? (out - rest - 1) / w.stride + 1 : 0),
          i(w.stride),
          i(rest),
          i(in),
          i(out),
          i(kernel)};
}

// out [n, out_h, out_w, groups * width] from in [n, in_h, in_w, groups * depth].
template <class T>
struct Gather {
  const T* in;
  const T* weight;  // [K, R, S, C / groups]
  const T* bias;    // [groups * width], or null
  T* out;
  int64_t images, depth, width, groups;
  Axis h, w;
  bool transposed;  // false: a weight's outputs are `width` and its inputs `depth`; true: the other way round

  COG_RWKV_BOTH int64_t places() const { return images * h.size * w.size; }
  // Where in `weight` the product of channel d with channel o is, at tap (r, s) of the kernel.
  COG_RWKV_BOTH int64_t weight_at(int64_t group, int64_t d, int64_t o, int64_t r, int64_t s) const {
    const int64_t outputs = transposed ? depth : width, inputs = transposed ? width : depth;
    const int64_t k = group * outputs + (transposed ? d : o), c = transposed ? o : d;
    return ((k * h.kernel + r) * w.kernel + s) * inputs + c;
  }
};

template <class T>
Gather<T> forward_gather(const ConvSizes& z, const T* x, const T* weight, const T* bias, T* out) {
  return {x,
          weight,
          bias,
          out,
          z.n,
          z.c_group(),
          z.k_group(),
          z.groups,
          forward_axis(z.h, z.r, z.p, z.rows),
          forward_axis(z.w, z.s, z.q, z.columns),
          false};
}

// Calls run(gather) for every remainder by the strides.
template <class T, class Run>
void backward_gathers(const ConvSizes& z, const T* gradient, const T* weight, T* out, const Run& run) {
  for (int64_t a = 0; a < z.rows.stride; a++) {
    for (int64_t b = 0; b < z.columns.stride; b++) {
      const Gather<T> gather{gradient,
                             weight,
                             nullptr,
                             out,
                             z.n,
                             z.k_group(),
                             z.c_group(),
                             z.groups,
                             backward_axis(z.p, z.r, z.h, z.rows, a),
                             backward_axis(z.q, z.s, z.w, z.columns, b),
                             true};
      if (gather.places() > 0 && gather.width > 0) run(gather);
    }
  }
}

}  // namespace cog_rwkv

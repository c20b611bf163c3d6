// conv2d and its gradients: CUDA launches.
#include "conv2d.h"

#include <cstdlib>
#include <string_view>

#include "half.cuh"
#include "plain.cuh"

namespace cog_rwkv {
namespace {

struct Gpu {
  int multiprocessors, shared;
  bool hopper;  // has wgmma
};

const Gpu& gpu(const char* op) {
  static Gpu known[64] = {};
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  Gpu& found = known[device % 64];
  if (found.multiprocessors == 0) {
    int major = 0, minor = 0, count = 0;
    check_cuda(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check_cuda(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    check_cuda(op, cudaDeviceGetAttribute(&found.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    check_cuda(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    cudaFuncAttributes code{};
    check_cuda(op, cudaFuncGetAttributes(&code, half_gather_kernel<Half, Shape<2, 1, 64>, 4, false, true>));
    // For tests and measurements: COG_RWKV_GPU=plain takes what any GPU can do.
    const char* wanted = std::getenv("COG_RWKV_GPU");
    const bool plain = wanted && std::string_view(wanted) == "plain";
    found.hopper = major == 9 && minor == 0 && code.binaryVersion == 90 && !plain;
    found.multiprocessors = count;
  }
  return found;
}

// Starts kernel<<<grid, threads, bytes>>>; `bytes` may be more than the 48 KiB that need no asking.
template <class Kernel, class... Arguments>
void start(const Launch& launch, const char* op, Kernel kernel, dim3 grid, int threads, int bytes,
           Arguments... arguments) {
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, threads, bytes, launch.stream>>>(arguments...);
  launch.check();
}

constexpr int kPadding = 1024;  // tiles begin on a multiple of it

template <class T>
constexpr bool is_half = sizeof(T) == 2;

bool aligned(const ConvSizes& z) { return z.c_group() % 8 == 0 && z.k_group() % 8 == 0; }

// Sizes that the kernels for tensor cores count in 32 bits.
bool countable(const ConvSizes& z) {
  constexpr int64_t most = 1 << 28;
  const int64_t windows = std::max({z.rows.padding, z.columns.padding, z.rows.dilation * z.r, z.columns.dilation * z.s,
                                    z.rows.stride * z.p, z.columns.stride * z.q, z.r * z.s});
  return std::max(z.n * z.p * z.q, z.n * z.h * z.w) < (int64_t{1} << 31) - 1024 && windows < most && z.c < most &&
         z.k < most && z.groups <= 65535;
}

template <class T, class S, bool transposed, bool hopper>
void start_gather(const Launch& launch, const char* op, const Gather<T>& a) {
  constexpr int stages = hopper ? 4 : 3;  // three fit into the shared memory of any GPU from 8.0 on
  const int64_t width_tiles = (a.width + S::width - 1) / S::width;
  const int64_t tiles = (a.places() + S::height - 1) / S::height * width_tiles;
  if (tiles > INT32_MAX) fail(op, "there are more than 2^31 tiles");
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.groups));
  const Grid places{Divisor(a.h.size), Divisor(a.w.size)};
  start(launch, op, half_gather_kernel<T, S, stages, transposed, hopper>, grid, S::threads,
        stages * S::bytes + kPadding, a, places, static_cast<int>(width_tiles));
}

// Takes the tile that wastes least: of the blocks in the last wave, and of what reaches over the result.
template <class T, bool transposed>
void half_gather(const Launch& launch, const char* op, const Gather<T>& a) {
  using Square = Shape<2, 1, 128>;
  using Thin = Shape<2, 1, 64>;
  if (!gpu(op).hopper) {
    if (a.width > 64) return start_gather<T, Square, transposed, false>(launch, op, a);
    return start_gather<T, Thin, transposed, false>(launch, op, a);
  }
  const auto cost = [&](int64_t height, int64_t width, double each) {
    const int64_t tiles = ((a.places() + height - 1) / height) * ((a.width + width - 1) / width) * a.groups;
    return each * static_cast<double>((tiles + gpu(op).multiprocessors - 1) / gpu(op).multiprocessors);
  };
  const double costs[4] = {cost(256, 128, 1.0), cost(128, 128, 0.58), cost(256, 64, 0.58), cost(128, 64, 0.36)};
  switch (std::min_element(costs, costs + 4) - costs) {
    case 0:
      return start_gather<T, Shape<2, 2, 128>, transposed, true>(launch, op, a);
    case 1:
      return start_gather<T, Square, transposed, true>(launch, op, a);
    case 2:
      return start_gather<T, Shape<2, 2, 64>, transposed, true>(launch, op, a);
    default:
      return start_gather<T, Thin, transposed, true>(launch, op, a);
  }
}

template <class T>
void run_gather(const Launch& launch, const char* op, const Gather<T>& a, const ConvSizes& z) {
  if constexpr (is_half<T>) {
    if (aligned(z) && countable(z) && aligned16(a.in, a.weight, a.out))
      return a.transposed ? half_gather<T, true>(launch, op, a) : half_gather<T, false>(launch, op, a);
  }
  const int64_t width_tiles = (a.width + kTile - 1) / kTile;
  const int64_t tiles = (a.places() + kTile - 1) / kTile * width_tiles * a.groups;
  plain_gather_kernel<<<blocks(tiles, 1), kPlainThreads, 0, launch.stream>>>(a, tiles, width_tiles);
  launch.check();
}

// Into how many parts `steps` are cut, so that `tiles` of each fill the GPU about twice.
int64_t parts_of(const char* op, int64_t tiles, int64_t steps) {
  const int64_t wanted = (2 * gpu(op).multiprocessors + tiles - 1) / tiles;
  return std::clamp<int64_t>(std::min(wanted, steps / 4), 1, 1024);
}

// Adds up `parts` results in float and rounds them once.
template <class T>
void add_parts(const Launch& launch, const Tensor& parts, const Tensor& out) {
  using A = arithmetic_t<T>;
  add_parts_kernel<T><<<blocks(out.numel(), 256), 256, 0, launch.stream>>>(data<A>(parts), mutable_data<T>(out),
                                                                           out.numel(), parts.size(0));
  launch.check();
}

template <class T>
Tensor room_for_parts(const Tensor& out, int64_t parts) {
  const auto type = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  return torch::stable::new_empty(out, {parts, out.numel()}, type);
}

template <class T, class S, bool hopper>
void half_weight(const Launch& launch, const char* op, const ConvSizes& z, const T* gradient, const T* x,
                 const Tensor& out) {
  const int64_t blocks_of_columns = z.r * z.s * ((z.c_group() + 63) / 64);
  const int64_t column_tiles = (blocks_of_columns + S::width / 64 - 1) / (S::width / 64);
  const int64_t tiles = column_tiles * ((z.k_group() + S::height - 1) / S::height);
  const int64_t steps = (z.n * z.p * z.q + 63) / 64;
  const int64_t part_steps =
      (steps + parts_of(op, tiles * z.groups, steps) - 1) / parts_of(op, tiles * z.groups, steps);
  const int64_t parts = (steps + part_steps - 1) / part_steps;
  const Tensor room = room_for_parts<T>(out, parts);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(z.groups), static_cast<unsigned>(parts));
  const Grid places{Divisor(z.p), Divisor(z.q)};
  constexpr int stages = hopper ? 4 : 3;
  start(launch, op, half_weight_kernel<T, S, stages, hopper>, grid, S::threads, stages * S::bytes + kPadding, gradient,
        x, mutable_data<float>(room), z, places, static_cast<int>(column_tiles), static_cast<int>(part_steps));
  add_parts<T>(launch, room, out);
}

template <class T>
void run_weight(const Launch& launch, const char* op, const ConvSizes& z, const T* gradient, const T* x,
                const Tensor& out) {
  if constexpr (is_half<T>) {
    if (aligned(z) && countable(z) && z.n * z.p * z.q > 0 && aligned16(gradient, x)) {
      using Square = Shape<2, 1, 128>;
      if (!gpu(op).hopper) return half_weight<T, Square, false>(launch, op, z, gradient, x, out);
      if (z.k_group() <= 64) return half_weight<T, Shape<1, 1, 128>, true>(launch, op, z, gradient, x, out);
      return half_weight<T, Square, true>(launch, op, z, gradient, x, out);
    }
  }
  const int64_t columns = z.r * z.s * z.c_group(), places = z.n * z.p * z.q;
  const int64_t tiles = (columns + kTile - 1) / kTile * ((z.k_group() + kTile - 1) / kTile) * z.groups;
  const int64_t parts = std::min<int64_t>(parts_of(op, tiles, places / kDeep), 256);
  const Tensor room = room_for_parts<T>(out, parts);
  const dim3 grid(blocks(tiles, 1), static_cast<unsigned>(parts));
  plain_weight_kernel<<<grid, kPlainThreads, 0, launch.stream>>>(gradient, x, mutable_data<arithmetic_t<T>>(room), z,
                                                                 tiles, (places + parts - 1) / parts);
  launch.check();
  add_parts<T>(launch, room, out);
}

Tensor conv2d_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t stride_h,
                   int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h, int64_t dilation_w,
                   int64_t groups) {
  constexpr const char* op = "conv2d";
  const ConvSizes z =
      check_conv(x, weight, bias, {stride_h, padding_h, dilation_h}, {stride_w, padding_w, dilation_w}, groups);
  const Launch launch(op, x);
  const Tensor in = as_nhwc(x), matrix = as_nhwc(weight);
  const std::optional<Tensor> add = bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  const Tensor out = empty_tensor(x, {z.n, z.p, z.q, z.k});
  if (out.numel() > 0) {
    dispatch_floating(x.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      run_gather(
          launch, op,
          forward_gather<T>(z, data<T>(in), data<T>(matrix), add ? data<T>(*add) : nullptr, mutable_data<T>(out)), z);
    });
  }
  return from_nhwc(out, is_channels_last(x));
}

Tensor input_gradient_cuda(const Tensor& gradient, const Tensor& weight, int64_t height, int64_t width,
                           int64_t stride_h, int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h,
                           int64_t dilation_w, int64_t groups, bool channels_last) {
  constexpr const char* op = "conv2d_input_gradient";
  const ConvSizes z = check_input_gradient(gradient, weight, height, width, {stride_h, padding_h, dilation_h},
                                           {stride_w, padding_w, dilation_w}, groups);
  const Launch launch(op, gradient);
  const Tensor in = as_nhwc(gradient), matrix = as_nhwc(weight);
  const Tensor out = empty_tensor(gradient, {z.n, z.h, z.w, z.c});
  if (out.numel() > 0) {
    dispatch_floating(gradient.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      backward_gathers<T>(z, data<T>(in), data<T>(matrix), mutable_data<T>(out),
                          [&](const auto& gather) { run_gather(launch, op, gather, z); });
    });
  }
  return from_nhwc(out, channels_last);
}

Tensor weight_gradient_cuda(const Tensor& gradient, const Tensor& x, int64_t kernel_h, int64_t kernel_w,
                            int64_t stride_h, int64_t stride_w, int64_t padding_h, int64_t padding_w,
                            int64_t dilation_h, int64_t dilation_w, int64_t groups, bool channels_last) {
  constexpr const char* op = "conv2d_weight_gradient";
  const ConvSizes z = check_weight_gradient(gradient, x, kernel_h, kernel_w, {stride_h, padding_h, dilation_h},
                                            {stride_w, padding_w, dilation_w}, groups);
  const Launch launch(op, x);
  const Tensor from = as_nhwc(gradient), in = as_nhwc(x);
  const Tensor out = empty_tensor(x, {z.k, z.r, z.s, z.c_group()});
  if (out.numel() > 0) {
    dispatch_floating(x.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      run_weight(launch, op, z, data<T>(from), data<T>(in), out);
    });
  }
  return from_nhwc(out, channels_last);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("conv2d", TORCH_BOX(&conv2d_cuda));
  m.impl("conv2d_input_gradient", TORCH_BOX(&input_gradient_cuda));
  m.impl("conv2d_weight_gradient", TORCH_BOX(&weight_gradient_cuda));
}

}  // namespace cog_rwkv

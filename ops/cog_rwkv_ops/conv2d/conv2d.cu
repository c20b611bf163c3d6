// conv2d and its gradients: CUDA launches.
#include "conv2d.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../csrc/aligned.cuh"
#include "half.cuh"
#include "plain.cuh"
#include "wide.h"
#include "wide_maps.cuh"

namespace cog_rwkv {
namespace {

// Starts kernel<<<grid, threads, bytes>>>; `bytes` may be more than the 48 KiB that need no asking.
template <class Kernel, class... Arguments>
void start(const Launch& launch, const char* op, Kernel kernel, dim3 grid, int threads, int bytes,
           Arguments... arguments) {
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, threads, bytes, launch.stream>>>(arguments...);
  launch.check();
}

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

// Tiles of 128 x 128, 128 x 64 and 64 x 128 results. Their shared memory is that of any GPU from 8.0 on.
using Square = Shape<2, 128, 3, 2>;
using Thin = Shape<2, 64, 3, 3>;
using Flat = Shape<1, 64, 3, 3>;

// Microseconds that a step of a tile takes on a multiprocessor: with enough blocks there, and with one alone. Measured
// on an H200; they decide between tiles and numbers of parts, nothing else.
struct StepTime {
  double busy, alone;
  int blocks;  // that fit on a multiprocessor
};
constexpr StepTime kSquareTime{0.33, 0.48, 2}, kThinTime{0.28, 0.38, 3};

struct Plan {
  double cost = 1e30;
  int64_t parts = 1;
};

// Into how many parts the steps of `tiles` tiles are best cut. `size` is that of the result.
Plan best_plan(const char* op, int64_t tiles, int64_t steps, int64_t size, const StepTime& time) {
  const int multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  Plan best;
  for (int64_t parts = 1; parts <= 256 && (parts == 1 || steps / parts >= 4); parts += 1 + parts / 4) {
    const auto each = (tiles * parts + multiprocessors - 1) / multiprocessors;
    const auto together = static_cast<double>(std::min<int64_t>(each, time.blocks));
    const auto steps_each = static_cast<double>((steps + parts - 1) / parts);
    double cost =
        static_cast<double>(each) * (steps_each * std::max(time.busy, time.alone / together) + 3.0 / together);
    if (parts > 1) cost += 2.5 + static_cast<double>(8 * size * parts) / 4e6;
    if (cost < best.cost) best = {cost, parts};
  }
  return best;
}

// Adds up `parts` results, and the bias, and rounds them once.
template <class T>
void add_parts(const Launch& launch, const char* op, const Tensor& parts, const T* bias, T* out, int64_t channels) {
  using A = arithmetic_t<T>;
  const int64_t size = parts.size(1), count = parts.size(0);
  const A* from = data<A>(parts);
  const auto with = [&](auto kernel, int64_t each) {
    launch_chained(op, launch.stream, kernel, dim3(blocks(size, each)), dim3(256), 0, from, bias, out, size, count,
                   channels);
  };
  if (size % 4 != 0 || !aligned16(out)) return with(add_parts_kernel<1, 8, T>, 32);
  if (count > 4) return with(add_parts_kernel<4, 8, T>, 128);
  with(add_parts_kernel<4, 1, T>, 1024);
}

template <class T>
Tensor room_for_parts(const Tensor& like, int64_t parts, int64_t size) {
  const auto type = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  return torch::stable::new_empty(like, {parts, size}, type);
}

// A tile of a group reaches into the next one where its channels are no multiple of 64: then TMA would read what is not
// of this group.
bool tiles_end(const ConvSizes& z) { return z.groups == 1 || (z.c_group() % kLine == 0 && z.k_group() % kLine == 0); }

// `all` are gathers into one result, at most kMostGathers.
template <class T, class S, bool transposed>
void start_gathers(const Launch& launch, const char* op, const std::vector<Gather<T>>& all, int64_t parts,
                   const Tensor& result) {
  const Gather<T>& first = all[0];
  Gathers gathers;
  int64_t tiles = 0;
  for (const Gather<T>& a : all) {
    const int g = gathers.count++;
    gathers.h[g] = a.h, gathers.w[g] = a.w;
    gathers.grid[g] = {Divisor(a.h.size), Divisor(a.w.size)};
    gathers.places[g] = static_cast<uint32_t>(a.places());
    tiles += (a.places() + S::height - 1) / S::height;
    gathers.first_tile[g + 1] = static_cast<uint32_t>(tiles);
  }
  const int64_t width_tiles = (first.width + S::width - 1) / S::width;
  if (tiles * width_tiles > INT32_MAX) fail(op, "there are more than 2^31 tiles");
  const dim3 grid(static_cast<unsigned>(tiles * width_tiles), static_cast<unsigned>(first.groups),
                  static_cast<unsigned>(parts));
  const int64_t size = result.numel();
  const Tensor room = room_for_parts<T>(result, parts > 1 ? parts : 0, size);
  float* const sums = parts > 1 ? mutable_data<float>(room) : nullptr;
  start(launch, op, half_gather_kernel<T, S, transposed>, grid, S::threads, S::shared, first, gathers,
        static_cast<int>(width_tiles), sums);
  if (parts > 1) add_parts<T>(launch, op, room, first.bias, first.out, first.groups * first.width);
}

// `whole`: they write all of the result, so that its parts can be added.
template <class T, class S>
Plan gather_plan(const char* op, const std::vector<Gather<T>>& all, bool whole, int64_t size, const StepTime& time) {
  int64_t tiles = 0, steps = 0, weighted = 0;
  for (const Gather<T>& a : all) {
    const int64_t mine = (a.places() + S::height - 1) / S::height;
    tiles += mine;
    weighted += mine * a.h.taps * a.w.taps;
  }
  steps = (weighted * ((all[0].depth + 63) / 64) + tiles - 1) / tiles;
  tiles *= (all[0].width + S::width - 1) / S::width * all[0].groups;
  return best_plan(op, tiles, whole ? steps : 1, size, time);
}

template <class T, bool transposed>
void half_gathers(const Launch& launch, const char* op, const std::vector<Gather<T>>& all, bool whole,
                  const Tensor& result) {
  const Plan square = gather_plan<T, Square>(op, all, whole, result.numel(), kSquareTime);
  const Plan thin = gather_plan<T, Thin>(op, all, whole, result.numel(), kThinTime);
  if (square.cost <= thin.cost) return start_gathers<T, Square, transposed>(launch, op, all, square.parts, result);
  start_gathers<T, Thin, transposed>(launch, op, all, thin.parts, result);
}

// best_conv_plan(). For tests and measurements: COG_RWKV_WIDE_CONV=rows,tokens,parts, where the first two are one of
// `tiles`.
template <size_t COUNT>
ConvPlan plan_for(const char* op, const TileSize (&tiles)[COUNT], const ConvJob* jobs, int count, int64_t rows,
                  int64_t groups, const ConvWork& work, bool transposed, bool gather, bool whole) {
  const auto each = static_cast<uint32_t>(rows), all = static_cast<uint32_t>(groups);
  const auto multiprocessors = static_cast<uint32_t>(device_attribute(op, cudaDevAttrMultiProcessorCount));
  const char* wanted = std::getenv("COG_RWKV_WIDE_CONV");
  TileSize tile{};
  uint32_t parts = 0;
  if (wanted && std::sscanf(wanted, "%u,%u,%u", &tile.rows, &tile.tokens, &parts) == 3) {
    for (const TileSize& size : tiles) {
      if (size.rows != tile.rows || size.tokens != tile.tokens) continue;
      parts = whole ? std::clamp(parts, 1u, kMostConvParts) : 1;
      return make_plan(jobs, count, each, all, tile, parts, multiprocessors);
    }
  }
  return best_conv_plan(tiles, jobs, count, each, all, work, transposed, gather, whole, multiprocessors);
}

// Whether wide.cuh can take these gathers: TMA counts in small numbers where a place reads.
template <class T>
bool wide_possible(const char* op, const std::vector<Gather<T>>& all, const ConvSizes& z) {
  return all[0].depth > 0 && tiles_end(z) && has_wgmma(op) &&
         std::all_of(all.begin(), all.end(), [](const auto& a) { return map_possible(a.h) && map_possible(a.w); });
}

// Of one dimension: strides leave some out.
int64_t pixels_read(const Axis& axis) { return std::min<int64_t>(axis.in_size, int64_t{axis.size} * axis.taps); }

template <class T>
void wide_gathers(const Launch& launch, const char* op, std::vector<Gather<T>> all, bool whole, const Tensor& result) {
  // The longest sums first, so that what is left at the end is short.
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return gather_steps(a) > gather_steps(b); });
  const Gather<T>& first = all[0];
  ConvJob jobs[kMostGathers];
  for (size_t i = 0; i < all.size(); i++) jobs[i] = {static_cast<uint32_t>(all[i].places()), gather_steps(all[i])};
  const auto size = static_cast<double>(result.numel());
  const int64_t read = first.images * pixels_read(first.h) * pixels_read(first.w) * first.groups * first.depth;
  const ConvPlan plan = plan_for(op, kGatherTiles, jobs, static_cast<int>(all.size()), first.width, first.groups,
                                 {2 * (size + static_cast<double>(read)), size}, first.transposed, true, whole);
  const Tensor room = room_for_parts<T>(result, plan.slices(), result.numel());
  start_wide_gathers<T>(op, launch.stream, all, plan, plan.slices() > 0 ? mutable_data<float>(room) : nullptr,
                        result.numel());
  if (plan.slices() > 0) add_parts<T>(launch, op, room, first.bias, first.out, first.groups * first.width);
}

// Runs gathers that together write all of `result`.
template <class T>
void run_gathers(const Launch& launch, const char* op, const std::vector<Gather<T>>& all, const ConvSizes& z,
                 const Tensor& result) {
  if constexpr (is_half<T>) {
    if (aligned(z) && countable(z) && aligned16(all[0].in, all[0].weight, all[0].out)) {
      for (size_t begin = 0; begin < all.size(); begin += kMostGathers) {
        const auto end = std::min(all.size(), begin + kMostGathers);
        const std::vector<Gather<T>> some(all.begin() + begin, all.begin() + end);
        const bool whole = some.size() == all.size();
        if (wide_possible(op, some, z)) {
          wide_gathers(launch, op, some, whole, result);
        } else if (all[0].transposed) {
          half_gathers<T, true>(launch, op, some, whole, result);
        } else {
          half_gathers<T, false>(launch, op, some, whole, result);
        }
      }
      return;
    }
  }
  for (const Gather<T>& a : all) {
    const int64_t width_tiles = (a.width + kTile - 1) / kTile;
    const int64_t tiles = (a.places() + kTile - 1) / kTile * width_tiles * a.groups;
    plain_gather_kernel<<<blocks(tiles, 1), kPlainThreads, 0, launch.stream>>>(a, tiles, width_tiles);
    launch.check();
  }
}

struct WeightTiles {
  int64_t column_tiles, tiles, steps;
  Plan plan;
};

template <class S>
WeightTiles weight_tiles(const char* op, const ConvSizes& z, const StepTime& time) {
  const int64_t blocks_of_columns = z.r * z.s * ((z.c_group() + 63) / 64);
  const int64_t column_tiles = (blocks_of_columns + S::width / 64 - 1) / (S::width / 64);
  const int64_t tiles = column_tiles * ((z.k_group() + S::height - 1) / S::height);
  const int64_t steps = (z.n * z.p * z.q + 63) / 64, size = z.k * z.r * z.s * z.c_group();
  return {column_tiles, tiles, steps, best_plan(op, tiles * z.groups, steps, size, time)};
}

template <class T, class S>
void half_weight(const Launch& launch, const char* op, const ConvSizes& z, const T* gradient, const T* x,
                 const Tensor& out, const WeightTiles& work) {
  const auto [column_tiles, tiles, steps, plan] = work;
  const int64_t size = out.numel();
  const int64_t part_steps = (steps + plan.parts - 1) / plan.parts, parts = (steps + part_steps - 1) / part_steps;
  const Tensor room = room_for_parts<T>(out, parts > 1 ? parts : 0, size);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(z.groups), static_cast<unsigned>(parts));
  const Grid places{Divisor(z.p), Divisor(z.q)};
  float* const sums = parts > 1 ? mutable_data<float>(room) : nullptr;
  T* const to = mutable_data<T>(out);
  start(launch, op, half_weight_kernel<T, S>, grid, S::threads, S::shared, gradient, x, to, sums, z, places,
        static_cast<int>(column_tiles), static_cast<int>(part_steps));
  if (parts > 1) add_parts<T>(launch, op, room, nullptr, mutable_data<T>(out), size);
}

template <class T>
void wide_weight(const Launch& launch, const char* op, const ConvSizes& z, const T* gradient, const T* x,
                 const Tensor& out) {
  const auto size = static_cast<double>(out.numel());
  const int64_t blocks = z.r * z.s * ((z.c_group() + kLine - 1) / kLine), places = z.n * z.p * z.q;
  const ConvJob job{static_cast<uint32_t>(z.k_group()), weight_steps(z)};
  const double read =
      2.0 * static_cast<double>(places * z.k + z.n * std::min(z.h, z.p * z.r) * std::min(z.w, z.q * z.s) * z.c);
  const ConvPlan plan = plan_for(op, kWeightTiles, &job, 1, blocks * kLine, z.groups, {read, size}, true, false, true);
  const Tensor room = room_for_parts<T>(out, plan.slices(), out.numel());
  start_wide_weight<T>(op, launch.stream, z, gradient, x, mutable_data<T>(out), plan,
                       plan.slices() > 0 ? mutable_data<float>(room) : nullptr);
  if (plan.slices() > 0) add_parts<T>(launch, op, room, nullptr, mutable_data<T>(out), out.numel());
}

template <class T>
void run_weight(const Launch& launch, const char* op, const ConvSizes& z, const T* gradient, const T* x,
                const Tensor& out) {
  if constexpr (is_half<T>) {
    if (aligned(z) && countable(z) && z.n * z.p * z.q > 0 && aligned16(gradient, x)) {
      if (has_wgmma(op) && map_possible(forward_axis(z.h, z.r, z.p, z.rows)) &&
          map_possible(forward_axis(z.w, z.s, z.q, z.columns))) {
        return wide_weight(launch, op, z, gradient, x, out);
      }
      const WeightTiles square = weight_tiles<Square>(op, z, kSquareTime), thin = weight_tiles<Thin>(op, z, kThinTime);
      const WeightTiles flat = weight_tiles<Flat>(op, z, kThinTime);
      if (square.plan.cost <= std::min(thin.plan.cost, flat.plan.cost)) {
        return half_weight<T, Square>(launch, op, z, gradient, x, out, square);
      }
      if (thin.plan.cost < flat.plan.cost) return half_weight<T, Thin>(launch, op, z, gradient, x, out, thin);
      return half_weight<T, Flat>(launch, op, z, gradient, x, out, flat);
    }
  }
  const int64_t columns = z.r * z.s * z.c_group(), places = z.n * z.p * z.q;
  const int64_t tiles = (columns + kTile - 1) / kTile * ((z.k_group() + kTile - 1) / kTile) * z.groups;
  const int multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  const int64_t wanted = (2 * multiprocessors + tiles - 1) / tiles;  // so that the GPU is full about twice
  const int64_t parts = std::clamp<int64_t>(std::min(wanted, places / (4 * kDeep)), 1, 256);
  const Tensor room = room_for_parts<T>(out, parts, out.numel());
  const dim3 grid(blocks(tiles, 1), static_cast<unsigned>(parts));
  plain_weight_kernel<<<grid, kPlainThreads, 0, launch.stream>>>(gradient, x, mutable_data<arithmetic_t<T>>(room), z,
                                                                 tiles, (places + parts - 1) / parts);
  launch.check();
  add_parts<T>(launch, op, room, nullptr, mutable_data<T>(out), out.numel());
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
      const T* biases = add ? data<T>(*add) : nullptr;
      run_gathers<T>(launch, op, {forward_gather<T>(z, data<T>(in), data<T>(matrix), biases, mutable_data<T>(out))}, z,
                     out);
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
      std::vector<Gather<T>> all;
      backward_gathers<T>(z, data<T>(in), data<T>(matrix), mutable_data<T>(out),
                          [&](const auto& gather) { all.push_back(gather); });
      run_gathers<T>(launch, op, all, z, out);
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

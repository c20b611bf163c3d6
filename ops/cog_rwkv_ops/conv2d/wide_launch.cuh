// The launches of wide.cuh's kernels, for one type.
#pragma once

#include "../csrc/aligned.cuh"
#include "wide.cuh"
#include "wide.h"
#include "wide_maps.cuh"

namespace cog_rwkv {

template <class Shape, class List>
void launch_convolution(const char* op, cudaStream_t stream, void (*kernel)(List), const List& list) {
  const uint32_t multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  launch_chained_clusters(op, stream, list.plan.joined ? 2 : 1, kernel,
                          dim3(std::min(list.plan.units(), multiprocessors)), dim3(kWideThreads), Shape::bytes, list);
}

// Calls run(ConvShape) for the tile of a plan, which is one of `tiles`.
template <const auto& tiles, size_t... I, class Run>
void with_shape(const char* op, const TileSize& tile, std::index_sequence<I...>, const Run& run) {
  const auto one = [&](auto shape) {
    using S = decltype(shape);
    if (tile.rows != S::ROWS || tile.tokens != S::TOKENS) return false;
    run(shape);
    return true;
  };
  if (!(one(ConvShape<tiles[I].rows, tiles[I].tokens>{}) || ...))
    fail(op, "there is no kernel for a tile of this size");
}

template <class T, class S>
WideGathers<T> describe(const char* op, const std::vector<Gather<T>>& all, const ConvPlan& plan, float* room,
                        int64_t size) {
  const Gather<T>& first = all[0];
  const bool transposed = first.transposed;
  const int64_t outputs = transposed ? first.depth : first.width, inputs = transposed ? first.width : first.depth;
  WideGathers<T> list{};
  list.plan = plan, list.out = first.out, list.bias = first.bias, list.room = room, list.size = size;
  list.depth = static_cast<int>(first.depth), list.width = static_cast<int>(first.width);
  list.weight = matrix_map(op, first.weight, inputs, int64_t{first.h.kernel} * first.w.kernel, outputs * first.groups,
                           transposed ? kLine : S::ROWS, false);
  for (size_t g = 0; g < all.size(); g++) {
    const Gather<T>& a = all[g];
    WideGather& job = list.jobs[g];
    job.h = a.h, job.w = a.w;
    job.taps = Divisor(std::max(1, a.h.taps * a.w.taps)), job.w_taps = Divisor(std::max(1, a.w.taps));
    job.grid = {Divisor(a.h.size), Divisor(a.w.size)};
    job.places = static_cast<uint32_t>(a.places());
    job.steps = gather_steps(a);
    job.first_y = static_cast<int>(map_line(a.h).first), job.first_x = static_cast<int>(map_line(a.w).first);
    job.plain = plain(a.h) && plain(a.w), job.packed = packed(a.h) && packed(a.w);
    if (job.steps > 0) list.pixels[g] = pixel_map(op, a.in, a.images, a.groups * a.depth, a.h, a.w, S::COPY);
  }
  return list;
}

template <class T>
void start_wide_gathers(const char* op, cudaStream_t stream, const std::vector<Gather<T>>& all, const ConvPlan& plan,
                        float* room, int64_t size) {
  constexpr auto indices = std::make_index_sequence<std::size(kGatherTiles)>{};
  with_shape<kGatherTiles>(op, plan.tile, indices, [&](auto shape) {
    using S = decltype(shape);
    const WideGathers<T> list = describe<T, S>(op, all, plan, room, size);
    if (all[0].transposed) {
      launch_convolution<S>(op, stream, wide_gather_kernel<T, S, true>, list);
    } else {
      launch_convolution<S>(op, stream, wide_gather_kernel<T, S, false>, list);
    }
  });
}

template <class T>
void start_wide_weight(const char* op, cudaStream_t stream, const ConvSizes& z, const T* gradient, const T* x, T* out,
                       const ConvPlan& plan, float* room) {
  const auto i = [](int64_t value) { return static_cast<int>(value); };
  const Axis h = forward_axis(z.h, z.r, z.p, z.rows), w = forward_axis(z.w, z.s, z.q, z.columns);
  WideWeight list{};
  list.pixels = pixel_map(op, x, z.n, z.c, h, w, kLine);
  list.gradient = matrix_map(op, gradient, z.k, z.n * z.p * z.q, 1, kLine, true);
  list.plan = plan, list.out = out, list.room = room, list.size = z.k * z.r * z.s * z.c_group();
  list.tap_blocks = Divisor((z.c_group() + kLine - 1) / kLine), list.w_taps = Divisor(z.s);
  list.grid = {Divisor(z.p), Divisor(z.q)};
  list.steps = weight_steps(z);
  list.k_group = i(z.k_group()), list.c_group = i(z.c_group()), list.taps = i(z.r * z.s);
  list.y_step = i(z.rows.stride), list.x_step = i(z.columns.stride);
  list.up = i(z.rows.padding), list.left = i(z.columns.padding);
  list.y_next = i(z.rows.dilation), list.x_next = i(z.columns.dilation);
  list.plain = plain(h) && plain(w);
  constexpr auto indices = std::make_index_sequence<std::size(kWeightTiles)>{};
  with_shape<kWeightTiles>(op, plan.tile, indices, [&](auto shape) {
    launch_convolution<decltype(shape)>(op, stream, wide_weight_kernel<T, decltype(shape)>, list);
  });
}

}  // namespace cog_rwkv

// What TMA is told of the images of conv2d. On the host.
#pragma once

#include "../csrc/tma.cuh"
#include "conv2d.h"

namespace cog_rwkv {

// Of one dimension of a gather.
inline MapLine map_line(const Axis& axis) {
  const int64_t span = int64_t{axis.taps - 1} * axis.tap_step;
  return {axis.in_size, axis.size, axis.step, axis.first + std::min<int64_t>(0, span)};
}

inline bool map_possible(const Axis& axis) {
  return axis.taps == 0 || (map_line(axis).possible() && int64_t{axis.taps - 1} * std::abs(axis.tap_step) <= 255);
}

// Whether place i reads pixel i alone.
inline bool plain(const Axis& axis) {
  return axis.taps == 1 && axis.step == 1 && axis.first == 0 && axis.size == axis.in_size;
}

// Whether place i is pixel i of the result.
inline bool packed(const Axis& axis) { return axis.out_step == 1 && axis.out_first == 0 && axis.size == axis.out_size; }

// Images [n][h][w][c], for tiles of `places` places of a grid by 64 channels.
template <class T>
CUtensorMap pixel_map(const char* op, const T* in, int64_t n, int64_t c, const Axis& h, const Axis& w,
                      uint32_t places) {
  if (plain(h) && plain(w)) return matrix_map(op, in, c, n * h.in_size * w.in_size, 1, places, true);
  return image_map(op, in, n, c, map_line(h), map_line(w), places);
}

}  // namespace cog_rwkv

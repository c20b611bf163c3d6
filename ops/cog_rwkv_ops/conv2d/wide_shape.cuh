// The tiles of conv2d on Hopper, and how they share out the memory of a block: see wide.cuh.
#pragma once

#include "../csrc/products_wide.cuh"
#include "wide_plan.h"

namespace cog_rwkv {

template <int ROWS_, int TOKENS_>
struct ConvShape {
  static constexpr int ROWS = ROWS_, TOKENS = TOKENS_;
  static constexpr bool shared_rows = false;              // both groups take every step
  static constexpr bool halves = ROWS == 64;              // they take the same rows, and half of the tokens each
  static constexpr int BLOCKS = halves ? 1 : ROWS / 128;  // blocks of 64 rows, of a group
  static constexpr int N = halves ? TOKENS / 2 : TOKENS;  // tokens of a group
  static constexpr int COPIES = TOKENS > 256 ? 2 : 1, COPY = TOKENS / COPIES;  // of the places of a gather
  static constexpr uint32_t weights = ROWS * 128, stage = weights + TOKENS * 128;
  static constexpr uint32_t turn = 32 * 128, turns = 4 * turn, barriers = 256, whole = 227 * 1024;
  static constexpr uint32_t table = N * 8, tables = 4 * table;  // where tokens are written, of two units of both groups
  static constexpr uint32_t rest = 1024 + turns + barriers + tables;  // tiles begin on a multiple of 1024
  static constexpr uint32_t room = (whole - rest) / stage, STAGES = room < 10 ? room : 10;
  static constexpr uint32_t bytes = STAGES * stage + rest;
  static constexpr uint32_t mail = BLOCKS * N * 256;  // the sums of a group
  static_assert(mail <= STAGES * stage);
  static_assert(STAGES >= 3 && (ROWS % 128 == 0 || halves) && N % 16 == 0 && COPY % 8 == 0);
};

}  // namespace cog_rwkv

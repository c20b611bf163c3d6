// How the rows of a group of products of few tokens are shared: among the blocks of a launch, the teams, by the bytes
// of the weights, and inside a block among its warps. Plain arithmetic, the same on host and device.
#pragma once

#include <cstdint>

#include "math.h"

namespace cog_rwkv {

constexpr int kProductWarps = 8;
constexpr uint32_t kChunk = 32;      // columns of a weight that a warp reads at a time
constexpr uint32_t kRowsAtOnce = 4;  // rows of a weight are given out by fours

struct RowRange {
  uint32_t begin, end;
};

// What a launch has to do, counted in units of kRowsAtOnce rows by one chunk.
struct TeamShares {
  uint32_t each, more;  // every team does `each` units, and the first `more` teams one more

  COG_RWKV_BOTH uint32_t begin(uint32_t team) const { return team * each + (team < more ? team : more); }
};

inline TeamShares share_units(uint64_t units, uint32_t teams) {
  return {static_cast<uint32_t>(units / teams), static_cast<uint32_t>(units % teams)};
}

// The units of a product of m rows by k columns.
COG_RWKV_BOTH uint32_t product_units(uint32_t m, uint32_t k) { return m / kRowsAtOnce * (k / kChunk); }

COG_RWKV_BOTH uint32_t divide_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The rows of a product of [m, k], behind whose first unit there are `before` others, that fall to the team of the
// units begin to end: those that start there.
COG_RWKV_BOTH RowRange rows_of_team(uint32_t m, uint32_t k, uint32_t before, uint32_t begin, uint32_t end) {
  const uint32_t chunks = k / kChunk, units = product_units(m, k);
  if (before >= end || before + units <= begin) return {0, 0};
  const uint32_t first = begin > before ? divide_up(begin - before, chunks) : 0;
  const uint32_t last = end - before < units ? divide_up(end - before, chunks) : m / kRowsAtOnce;
  return {first * kRowsAtOnce, last * kRowsAtOnce};
}

// Part `part` of 2^`log_parts` of `count` things.
COG_RWKV_BOTH RowRange part_of(uint32_t count, uint32_t part, uint32_t log_parts) {
  return {count * part >> log_parts, count * (part + 1) >> log_parts};
}

// How the warps of a block go through its rows of one product: in rounds, a tile for each group of 2^log_split warps
// that share the columns.
struct WarpPlan {
  RowRange rows;
  uint32_t log_split, rounds, tile;  // tile: rows

  COG_RWKV_BOTH RowRange tile_of(uint32_t round, uint32_t warp) const {
    const uint32_t begin = rows.begin + ((round * kProductWarps + warp) >> log_split) * tile;
    return begin >= rows.end ? RowRange{0, 0} : RowRange{begin, begin + tile < rows.end ? begin + tile : rows.end};
  }
};

// `most`: rows that a warp can take at a time.
COG_RWKV_BOTH WarpPlan plan_warps(RowRange rows, uint32_t log_split, uint32_t most) {
  const uint32_t groups = kProductWarps >> log_split, count = rows.end - rows.begin;
  const uint32_t rounds = divide_up(count, groups * most);
  const uint32_t tile = rounds == 0 ? 0 : divide_up(divide_up(count, rounds * groups), kRowsAtOnce) * kRowsAtOnce;
  return {rows, log_split, rounds, tile};
}

// Among how many warps (the power of two) the columns of a product are shared, where a block has few rows: each is to
// have some chunks.
COG_RWKV_BOTH uint32_t column_split(uint32_t k) {
  constexpr uint32_t least = 4;
  uint32_t log_split = 0;
  while ((2u << log_split) <= kProductWarps && k / kChunk >= (2u << log_split) * least) log_split++;
  return log_split;
}

}  // namespace cog_rwkv

// How conv2d is cut into tiles on Hopper: see wide.cuh. Plain arithmetic, the same on host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../csrc/wide_plan.h"

namespace cog_rwkv {

constexpr int kMostGathers = 4;           // that write different places of one result, in one launch
constexpr uint32_t kMostConvParts = 256;  // of the terms of a tile

// The sizes of a tile that there are kernels for. Of a gather: channels of the result by places. Of the gradient of the
// weight: columns (tap, channel) by outputs, whole blocks of 64.
constexpr TileSize kGatherTiles[] = {{64, 128},  {64, 256},  {64, 384},  {128, 48},  {128, 96}, {128, 128},
                                     {128, 160}, {128, 192}, {128, 208}, {128, 256}, {256, 96}};
constexpr TileSize kWeightTiles[] = {{64, 128}, {128, 64}, {128, 128}, {128, 192}, {128, 256}};

// One of the gathers of a launch, or the one gradient of a weight.
struct ConvJob {
  uint32_t tokens, steps;  // steps of 64 terms
};

// Units are numbered part by part; within, job by job, and the tiles of the same tokens after each other.
struct ConvPlan {
  TileSize tile;
  uint32_t parts, row_tiles, groups;
  uint32_t first[kMostGathers + 1];  // the first tile of each job, and the number of tiles

  COG_RWKV_BOTH uint32_t tiles() const { return first[kMostGathers]; }
  COG_RWKV_BOTH uint32_t units() const { return tiles() * parts; }
};

struct ConvPlace {
  uint32_t job, group, row, token, part;  // the first row and token, of a group
};

COG_RWKV_BOTH ConvPlace place_of(const ConvPlan& plan, uint32_t unit) {
  const uint32_t part = unit / plan.tiles(), tile = unit - part * plan.tiles();
  uint32_t job = 0;
  while (tile >= plan.first[job + 1]) job++;
  const uint32_t line = (tile - plan.first[job]) / plan.row_tiles, row = tile - plan.first[job] - line * plan.row_tiles;
  const uint32_t token = line / plan.groups;
  return {job, line - token * plan.groups, row * plan.tile.rows, token * plan.tile.tokens, part};
}

// The steps of part `part` of `parts`.
COG_RWKV_BOTH RowRange part_of_steps(uint32_t steps, uint32_t part, uint32_t parts) {
  return {static_cast<uint32_t>(uint64_t{steps} * part / parts),
          static_cast<uint32_t>(uint64_t{steps} * (part + 1) / parts)};
}

// `rows`: of a group.
inline ConvPlan make_plan(const ConvJob* jobs, int count, uint32_t rows, uint32_t groups, TileSize tile,
                          uint32_t parts) {
  ConvPlan plan{tile, parts, divide_up(rows, tile.rows), groups, {}};
  for (int i = 0; i < kMostGathers; i++) {
    const uint32_t lines = i < count ? divide_up(jobs[i].tokens, tile.tokens) * groups : 0;
    plan.first[i + 1] = plan.first[i] + lines * plan.row_tiles;
  }
  return plan;
}

// What a launch does besides: `bytes` that must come from memory or go there, `size` results.
struct ConvWork {
  double bytes, size;
};

// Cycles that a plan may take. The constants are those of the products.
inline double plan_cycles(const ConvPlan& plan, const ConvJob* jobs, int count, const ConvWork& work,
                          uint32_t multiprocessors) {
  const uint32_t units = plan.units(), blocks = units < multiprocessors ? units : multiprocessors;
  const double tile = double(plan.tile.rows) * plan.tile.tokens;
  const double bytes = (plan.tile.rows + plan.tile.tokens) * kStepTerms * 2.0;
  const double tensor = tile * kStepTerms * kTensorCycles, ingress = bytes * kIngressCycles;
  const double cache = blocks * bytes * kCacheCycles, busiest = tensor > ingress ? tensor : ingress;
  const double step = (busiest > cache ? busiest : cache) + 10, end = 800 + tile / (plan.parts == 1 ? 32 : 16);
  double sum = 0, longest = 0;  // the cycles of all units, and of the longest
  for (int i = 0; i < count; i++) {
    const double unit = divide_up(jobs[i].steps, plan.parts) * step + end;
    sum += unit * (plan.first[i + 1] - plan.first[i]) * plan.parts;
    longest = unit > longest ? unit : longest;
  }
  const double busy = count == 1 ? divide_up(units, blocks) * longest : sum / blocks + longest / 2;
  const double memory = work.bytes * kMemoryCycles + end;
  const double adding = plan.parts == 1 ? 0 : 2500 + 8 * work.size * plan.parts * kCacheCycles;
  const double most = busy > memory ? busy : memory, least = busy > memory ? memory : busy;
  return kStartCycles + most + least / 8 + adding;
}

// `jobs`: those with the most steps first. Several parts only where `whole`: the jobs write all of the result.
template <size_t COUNT>
ConvPlan best_conv_plan(const TileSize (&tiles)[COUNT], const ConvJob* jobs, int count, uint32_t rows, uint32_t groups,
                        const ConvWork& work, bool whole, uint32_t multiprocessors) {
  ConvPlan best{};
  double least = 0;
  for (const TileSize& tile : tiles) {
    for (uint32_t parts = 1; parts <= kMostConvParts; parts += 1 + parts / 16) {
      if (parts > 1 && (!whole || jobs[0].steps / parts < 4)) break;
      const ConvPlan plan = make_plan(jobs, count, rows, groups, tile, parts);
      const double cycles = plan_cycles(plan, jobs, count, work, multiprocessors);
      if (least == 0 || cycles < least) best = plan, least = cycles;
      if (plan.tiles() * uint64_t{parts} > 2 * multiprocessors) break;
    }
  }
  return best;
}

}  // namespace cog_rwkv

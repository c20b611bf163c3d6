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
constexpr TileSize kGatherTiles[] = {{64, 128},  {64, 256},  {64, 384},  {128, 48},  {128, 96},  {128, 112},
                                     {128, 128}, {128, 160}, {128, 192}, {128, 208}, {128, 256}, {256, 96}};
constexpr TileSize kWeightTiles[] = {{64, 128}, {128, 64}, {128, 128}, {128, 192}, {128, 256}};

// One of the gathers of a launch, or the one gradient of a weight.
struct ConvJob {
  uint32_t tokens, steps;  // steps of 64 terms
};

// Units are numbered part by part; within, job by job, and the tiles of the same tokens after each other. Two parts may
// be joined: then they are units of the same cluster of two blocks, which add them up on their own.
struct ConvPlan {
  TileSize tile;
  uint32_t parts, row_tiles, groups;
  bool joined;
  uint32_t first[kMostGathers + 1];  // the first tile of each job, and the number of tiles

  COG_RWKV_BOTH uint32_t tiles() const { return first[kMostGathers]; }
  COG_RWKV_BOTH uint32_t units() const { return tiles() * parts; }
  // Results in float32 that are written, to be added up.
  COG_RWKV_BOTH uint32_t slices() const { return joined || parts == 1 ? 0 : parts; }
};

struct ConvPlace {
  uint32_t job, group, row, token, part;  // the first row and token, of a group
};

COG_RWKV_BOTH ConvPlace place_of(const ConvPlan& plan, uint32_t unit) {
  const uint32_t part = plan.joined ? unit % 2 : unit / plan.tiles();
  const uint32_t tile = plan.joined ? unit / 2 : unit - part * plan.tiles();
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

// `rows`: of a group. Two parts are joined where each has a multiprocessor.
inline ConvPlan make_plan(const ConvJob* jobs, int count, uint32_t rows, uint32_t groups, TileSize tile, uint32_t parts,
                          uint32_t multiprocessors) {
  ConvPlan plan{tile, parts, divide_up(rows, tile.rows), groups, false, {}};
  for (int i = 0; i < kMostGathers; i++) {
    const uint32_t lines = i < count ? divide_up(jobs[i].tokens, tile.tokens) * groups : 0;
    plan.first[i + 1] = plan.first[i] + lines * plan.row_tiles;
  }
  plan.joined = parts == 2 && plan.units() <= multiprocessors;
  return plan;
}

// What a launch does besides: `bytes` that must come from memory or go there, `size` results.
struct ConvWork {
  double bytes, size;
};

// ---- which plan: cycles that it may take. Estimates from an H200, of all tiles at the shapes of a ResNet; they decide
// between plans, nothing else.

constexpr double kConvTensorCycles = 1.0 / 1920;     // a multiply-add, of a multiprocessor
constexpr double kConvIngressCycles = 1.0 / 62;      // a byte into the shared memory of one
constexpr double kCopyCycles = 90, kBoxCycles = 30;  // a step, and each of its copies, of a warp that copies
constexpr uint32_t kCopyWarps = 3;                   // which take steps in turns
constexpr double kEndCycles = 1500;                  // of a tile, besides what it writes
constexpr double kRoundedCycles = 1.0 / 16, kFloatCycles = 1.0 / 6;  // a result that is written, or one of a part
constexpr double kAddCycles = 800, kPartCycles = 80;         // to add parts up in another kernel, and each of them
constexpr double kAddedCycles = 8.0 / 5000;                  // one result of a part, written and read
constexpr double kJoinCycles = 1000, kSentCycles = 1.0 / 7;  // to join two parts, and a result: 2 bytes at 14 a cycle

// Copies of a step of a tile: boxes of 256 places of a gather, or of 64 channels where these are not what is added up.
inline uint32_t boxes_of(TileSize tile, bool transposed, bool gather) {
  return (transposed ? tile.rows / kStepTerms : 1) + (gather ? divide_up(tile.tokens, 256) : tile.tokens / kStepTerms);
}

inline double plan_cycles(const ConvPlan& plan, const ConvJob* jobs, const ConvWork& work, uint32_t boxes,
                          uint32_t multiprocessors) {
  const uint32_t units = plan.units(), blocks = units < multiprocessors ? units : multiprocessors;
  const double tile = double(plan.tile.rows) * plan.tile.tokens;
  const double bytes = (plan.tile.rows + plan.tile.tokens) * kStepTerms * 2.0;
  const double tensor = tile * kStepTerms * kConvTensorCycles, cache = blocks * bytes * kCacheCycles;
  const double copy = (kCopyCycles + boxes * kBoxCycles) / kCopyWarps + bytes * kConvIngressCycles;
  const double busiest = tensor > copy ? tensor : copy, step = (busiest > cache ? busiest : cache) + 10;
  const double joining = plan.joined ? kJoinCycles + tile * kSentCycles : 0;
  const double end = kEndCycles + joining + tile * (plan.slices() == 0 ? kRoundedCycles : kFloatCycles);
  double busy = 0;
  for (uint32_t unit = 0; unit < units; unit += blocks) {  // the longest sums come first
    busy += divide_up(jobs[place_of(plan, unit).job].steps, plan.parts) * step + end;
  }
  const double memory = work.bytes * kMemoryCycles + end;
  const double parts = plan.slices(), adding = parts * (kPartCycles + work.size * kAddedCycles);
  const double most = busy > memory ? busy : memory, least = busy > memory ? memory : busy;
  return kStartCycles + most + least / 8 + adding + (parts > 0 ? kAddCycles : 0);
}

// `jobs`: those with the most steps first. `transposed`, `gather`: see boxes_of(). Several parts only where `whole`:
// the jobs write all of the result.
template <size_t COUNT>
ConvPlan best_conv_plan(const TileSize (&tiles)[COUNT], const ConvJob* jobs, int count, uint32_t rows, uint32_t groups,
                        const ConvWork& work, bool transposed, bool gather, bool whole, uint32_t multiprocessors) {
  ConvPlan best{};
  double least = 0;
  for (const TileSize& tile : tiles) {
    const uint32_t boxes = boxes_of(tile, transposed, gather);
    for (uint32_t parts = 1; parts <= kMostConvParts; parts += 1 + parts / 16) {
      if (parts > 1 && (!whole || jobs[0].steps / parts < 4)) break;
      const ConvPlan plan = make_plan(jobs, count, rows, groups, tile, parts, multiprocessors);
      const double cycles = plan_cycles(plan, jobs, work, boxes, multiprocessors);
      if (least == 0 || cycles < least) best = plan, least = cycles;
      if (plan.tiles() * uint64_t{parts} > 2 * multiprocessors) break;
    }
  }
  return best;
}

}  // namespace cog_rwkv

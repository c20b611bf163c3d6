// How products of many tokens are cut into tiles, and which blocks compute them: see products_wide.cuh. Plain
// arithmetic, the same on host and device.
#pragma once

#include <cstdint>

#include "math.h"
#include "products_plan.h"

namespace cog_rwkv {

constexpr uint32_t kStepTerms = 64;  // of a sum, that are loaded at a time
constexpr int kMostJobs = 8;         // products in a group
constexpr uint32_t kMostTeam = 8;    // blocks in a cluster, on every GPU that has them
constexpr uint32_t kMostParts = 4;   // of the terms of a tile

// The sizes of a tile that there are kernels for: rows of a weight by tokens.
struct TileSize {
  uint32_t rows, tokens;
};
constexpr TileSize kTileSizes[] = {{128, 64},  {128, 128}, {128, 160}, {128, 192}, {128, 208},
                                   {128, 240}, {128, 256}, {256, 128}, {256, 160}};

// How the blocks of a cluster stand to each other. Those that differ in their rows alone need the same activations,
// those that differ in their tokens alone need the same weights: each loads a part of them for all. And several may
// share one tile, each with a part of the terms of its sums.
struct WideTeam {
  uint32_t rows, tokens, parts;

  COG_RWKV_BOTH uint32_t blocks() const { return rows * tokens * parts; }
};

// Who a block is in its cluster, and who the others are.
struct WideRank {
  uint32_t row, token, part;

  COG_RWKV_BOTH WideRank(const WideTeam& team, uint32_t block)
      : row(block % team.rows), token(block / team.rows % team.tokens), part(block / (team.rows * team.tokens)) {}
  COG_RWKV_BOTH uint32_t block(const WideTeam& team, uint32_t row_, uint32_t token_, uint32_t part_) const {
    return (part_ * team.tokens + token_) * team.rows + row_;
  }
};

// The tiles that a cluster computes at a time are a unit: team.rows below each other by team.tokens side by side.
struct WidePlan {
  TileSize tile;
  WideTeam team;
  uint32_t token_units, band;     // units that all tokens take; of these, so many go through the rows together
  uint32_t first[kMostJobs + 1];  // the first unit of each product, and the number of units
};

struct WideJob {
  uint32_t m, k;  // rows and columns of the weight
};

struct WidePlace {
  uint32_t job, row, token;  // the first of a unit
};

COG_RWKV_BOTH WidePlace place_of(const WidePlan& plan, uint32_t unit) {
  uint32_t job = 0;
  while (unit >= plan.first[job + 1]) job++;
  const uint32_t inside = unit - plan.first[job], rows = (plan.first[job + 1] - plan.first[job]) / plan.token_units;
  const uint32_t band = inside / (rows * plan.band), at = inside - band * rows * plan.band;
  const uint32_t left = plan.token_units - band * plan.band, here = plan.band < left ? plan.band : left;
  return {job, at / here * plan.tile.rows * plan.team.rows,
          (band * plan.band + at % here) * plan.tile.tokens * plan.team.tokens};
}

COG_RWKV_BOTH uint32_t steps_of(uint32_t k) { return divide_up(k, kStepTerms); }

// The steps of part `part` of `parts` of the terms.
COG_RWKV_BOTH RowRange steps_of_part(uint32_t k, uint32_t part, uint32_t parts) {
  return {steps_of(k) * part / parts, steps_of(k) * (part + 1) / parts};
}

// What is known of a GPU: how many clusters of 1, 2, 4 and 8 blocks run at once; 0 where there are none.
struct WideGpu {
  uint32_t clusters[4];

  uint32_t of(uint32_t blocks) const { return clusters[blocks == 1 ? 0 : blocks == 2 ? 1 : blocks == 4 ? 2 : 3]; }
};

inline WidePlan make_plan(const WideJob* jobs, int count, uint32_t n, TileSize tile, WideTeam team) {
  constexpr uint32_t together = 4096;  // tokens, about, whose activations stay in L2 while weights go by
  WidePlan plan{tile, team, divide_up(n, tile.tokens * team.tokens), 0, {}};
  const uint32_t bands = divide_up(plan.token_units * tile.tokens * team.tokens, together + together / 4);
  plan.band = divide_up(plan.token_units, bands);
  for (int i = 0; i < count; i++) {
    plan.first[i + 1] = plan.first[i] + divide_up(jobs[i].m, tile.rows * team.rows) * plan.token_units;
  }
  for (int i = count; i < kMostJobs; i++) plan.first[i + 1] = plan.first[i];
  return plan;
}

// ---- which plan: cycles that it may take. Estimates; they decide between plans, nothing else.

constexpr double kTensorCycles = 1.0 / 2048;  // a multiply-add, of a multiprocessor
constexpr double kIngressCycles = 1.0 / 56;   // a byte into the shared memory of one
constexpr double kCacheCycles = 1.0 / 4000;   // a byte out of L2, for all of them
constexpr double kMemoryCycles = 1.0 / 2450;  // a byte out of memory
constexpr double kRemoteCycles = 1.0 / 12;    // a byte out of another's shared memory
constexpr double kStartCycles = 2500;         // until the first tiles are there

// Of one step of a tile, while `blocks` blocks run.
inline double step_cycles(const WidePlan& plan, uint32_t blocks) {
  const double weights = plan.tile.rows * kStepTerms * 2.0, tokens = plan.tile.tokens * kStepTerms * 2.0;
  const double tensor = double(plan.tile.rows) * plan.tile.tokens * kStepTerms * kTensorCycles;
  const double ingress = (weights + tokens) * kIngressCycles;
  const double cache = blocks * (weights / plan.team.tokens + tokens / plan.team.rows) * kCacheCycles;
  const double busiest = tensor > ingress ? tensor : ingress;
  return (busiest > cache ? busiest : cache) + 10;
}

// Of what comes behind the sums of a tile.
inline double end_cycles(const WidePlan& plan) {
  const double values = double(plan.tile.rows) * plan.tile.tokens, parts = plan.team.parts;
  const double split = parts == 1 ? 0 : 1500 + 4 * values * (kRemoteCycles * (parts - 1) / parts + 1.0 / 128);
  return 500 + values * (1.0 / 32) + split;
}

inline double plan_cycles(const WidePlan& plan, const WideJob* jobs, int count, uint32_t n, uint32_t clusters) {
  const uint32_t units = plan.first[count], teams = units < clusters ? units : clusters;
  const double step = step_cycles(plan, teams * plan.team.blocks()), end = end_cycles(plan);
  double busy = 0, bytes = 0;
  for (uint32_t unit = 0; unit < units; unit += teams) {  // the products with the longest sums come first
    busy += divide_up(steps_of(jobs[place_of(plan, unit).job].k), plan.team.parts) * step + end;
  }
  for (int i = 0; i < count; i++) {
    bytes += 2.0 * jobs[i].m * jobs[i].k + 2.0 * n * jobs[i].k + 2.0 * n * jobs[i].m;
  }
  const double memory = bytes * kMemoryCycles + end;
  return kStartCycles + (busy > memory ? busy : memory);
}

// A part of a tile's activations is some times 8 tokens; no part of the terms is empty.
inline bool plan_possible(const WidePlan& plan, const WideJob* jobs, int count) {
  if (plan.team.blocks() > kMostTeam || plan.team.parts > kMostParts) return false;
  if (plan.tile.tokens % (8 * plan.team.rows) != 0 || plan.tile.rows % (64 * plan.team.tokens) != 0) return false;
  for (int i = 0; i < count; i++) {
    if (steps_of(jobs[i].k) < plan.team.parts) return false;
  }
  return true;
}

// `jobs`: those with the most columns first. n is at least 1, and the rows of all jobs times n fit into 2^43.
inline WidePlan best_wide_plan(const WideJob* jobs, int count, uint32_t n, const WideGpu& gpu) {
  WidePlan best{};
  double least = 0;
  for (const TileSize& tile : kTileSizes) {
    for (uint32_t rows = 1; rows <= 4; rows *= 2) {
      for (uint32_t tokens = 1; tokens <= 2; tokens *= 2) {
        for (uint32_t parts = 1; parts <= kMostParts; parts *= 2) {
          const WidePlan plan = make_plan(jobs, count, n, tile, {rows, tokens, parts});
          if (!plan_possible(plan, jobs, count) || gpu.of(plan.team.blocks()) == 0) continue;
          const double cycles = plan_cycles(plan, jobs, count, n, gpu.of(plan.team.blocks()));
          if (least == 0 || cycles < least) best = plan, least = cycles;
        }
      }
    }
  }
  return best;
}

}  // namespace cog_rwkv

// How products are cut into tiles on Hopper: see products_wide.cuh. Plain arithmetic, the same on host and device.
#pragma once

#include <cstdint>

#include "math.h"
#include "products_plan.h"

namespace cog_rwkv {

constexpr uint32_t kStepTerms = 64;  // of a sum, that are loaded at a time
constexpr int kMostJobs = 8;         // products in a group
constexpr uint32_t kMostParts = 8;   // of the terms of a tile

// The sizes of a tile that there are kernels for: rows of a weight by tokens.
struct TileSize {
  uint32_t rows, tokens;
};
constexpr TileSize kTileSizes[] = {{64, 16},   {64, 32},   {128, 16},  {128, 32}, {128, 64},  {128, 128}, {128, 160},
                                   {128, 192}, {128, 240}, {128, 256}, {256, 64}, {256, 128}, {256, 160}};

// A unit is a tile, or one of several parts of the terms of its sums.
struct WidePlan {
  TileSize tile;
  uint32_t parts;
  uint32_t token_tiles, band;     // tiles that all tokens take; of these, so many go through the rows together
  uint32_t first[kMostJobs + 1];  // the first unit of each product, and the number of units
};

struct WideJob {
  uint32_t m, k;  // rows and columns of the weight
};

struct WidePlace {
  uint32_t job, row, token, part;  // the first row and token of a unit
};

COG_RWKV_BOTH WidePlace place_of(const WidePlan& plan, uint32_t unit) {
  uint32_t job = 0;
  while (unit >= plan.first[job + 1]) job++;
  const uint32_t part = (unit - plan.first[job]) % plan.parts, inside = (unit - plan.first[job]) / plan.parts;
  const uint32_t rows = (plan.first[job + 1] - plan.first[job]) / (plan.token_tiles * plan.parts);
  const uint32_t band = inside / (rows * plan.band), at = inside - band * rows * plan.band;
  const uint32_t left = plan.token_tiles - band * plan.band, here = plan.band < left ? plan.band : left;
  return {job, at / here * plan.tile.rows, (band * plan.band + at % here) * plan.tile.tokens, part};
}

COG_RWKV_BOTH uint32_t steps_of(uint32_t k) { return divide_up(k, kStepTerms); }

// The steps of part `part` of `parts` of the terms.
COG_RWKV_BOTH RowRange steps_of_part(uint32_t k, uint32_t part, uint32_t parts) {
  return {steps_of(k) * part / parts, steps_of(k) * (part + 1) / parts};
}

inline WidePlan make_plan(const WideJob* jobs, int count, uint32_t n, TileSize tile, uint32_t parts) {
  constexpr uint32_t together = 4096;  // tokens, about, whose activations stay in L2 while weights go by
  WidePlan plan{tile, parts, divide_up(n, tile.tokens), 0, {}};
  const uint32_t bands = divide_up(plan.token_tiles * tile.tokens, together + together / 4);
  plan.band = divide_up(plan.token_tiles, bands);
  for (int i = 0; i < count; i++) {
    plan.first[i + 1] = plan.first[i] + divide_up(jobs[i].m, tile.rows) * plan.token_tiles * parts;
  }
  for (int i = count; i < kMostJobs; i++) plan.first[i + 1] = plan.first[i];
  return plan;
}

// How many blocks go through the units. `together`: that fit a multiprocessor. One each is best, as the next kernel's
// then have room beside them; but where some would have two units and others one, two that run together share what
// comes from memory, and all end at once.
inline uint32_t blocks_of(const WidePlan& plan, uint32_t multiprocessors, uint32_t together) {
  const uint32_t units = plan.first[kMostJobs];
  if (units <= multiprocessors) return units;
  const uint32_t rounds = divide_up(units, multiprocessors);
  return units * 10 < rounds * multiprocessors * 9 && units <= together * multiprocessors ? units : multiprocessors;
}

// ---- which plan: cycles that it may take. Estimates from an H200; they decide between plans, nothing else.

constexpr double kTensorCycles = 1.0 / 1550;  // a multiply-add, of a multiprocessor
constexpr double kIngressCycles = 1.0 / 50;   // a byte into the shared memory of one
constexpr double kCacheCycles = 1.0 / 6500;   // a byte out of L2, for all of them
constexpr double kMemoryCycles = 1.0 / 2450;  // a byte out of memory, for all of them
constexpr double kAgainCycles = 0.6 / 2450;   // the same, of weights that several tiles want at the same time, beyond
constexpr double kAheadBytes = 12e6;          // what is there before the kernel ahead has ended
constexpr double kPullCycles = 1.0 / 28;      // the same, for one
constexpr double kSliceCycles = 1.0 / 1500;   // a byte of a slice, by who writes it or who adds it up
constexpr double kStartCycles = 2500;         // until the first tiles are there

// Of one step of a tile, while `blocks` blocks run.
inline double step_cycles(const WidePlan& plan, bool transposed, uint32_t blocks) {
  const double weights = plan.tile.rows * kStepTerms * 2.0, tokens = plan.tile.tokens * kStepTerms * 2.0;
  // Fewer tokens: the weights of a tile are read more often for as many products.
  const double tensor = plan.tile.rows * (plan.tile.tokens + 16.0) * kStepTerms * kTensorCycles;
  // Transposed weights come in short pieces of many rows, which takes longer than their bytes.
  const double pieces = transposed ? 700 + weights / 64 : 0, ingress = (weights + tokens) * kIngressCycles;
  const double cache = blocks * (weights + tokens) * kCacheCycles;
  double busiest = tensor > ingress ? tensor : ingress;
  busiest = busiest > pieces ? busiest : pieces;
  return (busiest > cache ? busiest : cache) + 10;
}

inline double plan_cycles(const WidePlan& plan, const WideJob* jobs, int count, uint32_t n, bool transposed,
                          uint32_t multiprocessors) {
  const uint32_t units = plan.first[count], blocks = units < multiprocessors ? units : multiprocessors;
  const double step = step_cycles(plan, transposed, blocks), end = 500 + plan.tile.rows * plan.tile.tokens / 32.0;
  double busy = 0, bytes = 0, weights = 0;
  for (uint32_t unit = 0; unit < units; unit += blocks) {  // the products with the longest sums come first
    busy += divide_up(steps_of(jobs[place_of(plan, unit).job].k), plan.parts) * step + end;
  }
  for (int i = 0; i < count; i++) {
    weights += 2.0 * jobs[i].m * jobs[i].k;
    bytes += 2.0 * jobs[i].m * jobs[i].k + 2.0 * n * jobs[i].k + 2.0 * n * jobs[i].m;
  }
  const double pull = kPullCycles / blocks;
  const double again = plan.token_tiles == 1 || weights < kAheadBytes ? 0 : (weights - kAheadBytes) * kAgainCycles;
  const double memory = bytes * (pull > kMemoryCycles ? pull : kMemoryCycles) + again + end;
  const double slices = plan.parts == 1 ? 0 : 8.0 * n * jobs[0].m * plan.parts * kSliceCycles;  // written and read
  return kStartCycles + (busy > memory ? busy : memory) + slices;
}

// `jobs`: those with the most columns first. n is at least 1, and the rows of all jobs times n fit into 2^40. Several
// parts only where `most_parts` says so, and then of one job; each has a step or more.
inline WidePlan best_wide_plan(const WideJob* jobs, int count, uint32_t n, bool transposed, uint32_t most_parts,
                               uint32_t multiprocessors) {
  WidePlan best{};
  double least = 0;
  for (const TileSize& tile : kTileSizes) {
    for (uint32_t parts = 1; parts <= most_parts && parts <= steps_of(jobs[0].k); parts *= 2) {
      const WidePlan plan = make_plan(jobs, count, n, tile, parts);
      const double cycles = plan_cycles(plan, jobs, count, n, transposed, multiprocessors);
      if (least == 0 || cycles < least) best = plan, least = cycles;
    }
  }
  return best;
}

}  // namespace cog_rwkv

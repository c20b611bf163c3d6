"""csrc/wide_plan.h, on the host: the plans cover every row, token and term once, and fit the device."""

import shutil
import subprocess
from pathlib import Path

import pytest

import cog_rwkv_ops

CSRC = Path(cog_rwkv_ops.__file__).parent / "csrc"
PROGRAM = r"""
#include "wide_plan.h"

#include <cstdio>
#include <vector>

using namespace cog_rwkv;

using Jobs = std::vector<WideJob>;

// 0 where every cell of 32 rows by 16 tokens of every product is once in the tiles of each part, and every step in one
// part.
int covered_once(const WidePlan& plan, const Jobs& jobs, uint32_t n) {
  const uint32_t columns = divide_up(n, 16);
  std::vector<std::vector<uint8_t>> times;
  for (const WideJob& job : jobs) times.emplace_back(size_t{divide_up(job.m, 32)} * columns * plan.parts);
  for (uint32_t unit = 0; unit < plan.first[kMostJobs]; unit++) {
    const WidePlace place = place_of(plan, unit);
    if (place.job >= jobs.size() || place.part >= plan.parts) return 1;
    if (place.row >= jobs[place.job].m || place.token >= n) return 2;
    for (uint32_t row = place.row; row < place.row + plan.tile.rows && row < jobs[place.job].m; row += 32) {
      for (uint32_t token = place.token; token < place.token + plan.tile.tokens && token < n; token += 16) {
        times[place.job][(size_t{row / 32} * columns + token / 16) * plan.parts + place.part]++;
      }
    }
  }
  for (const auto& counts : times) {
    for (int count : counts) {
      if (count != 1) return 3;
    }
  }
  for (const WideJob& job : jobs) {
    uint32_t step = 0;
    for (uint32_t part = 0; part < plan.parts; part++) {
      const RowRange steps = steps_of_part(job.k, part, plan.parts);
      if (steps.begin != step || steps.end == steps.begin) return 4;
      step = steps.end;
    }
    if (step * kStepTerms < job.k || (step - 1) * kStepTerms >= job.k) return 5;
  }
  return 0;
}

bool known(TileSize tile) {
  for (const TileSize& size : kTileSizes) {
    if (size.rows == tile.rows && size.tokens == tile.tokens) return true;
  }
  return false;
}

// Every plan that is chosen, with parts and without, and every size of a tile with numbers of parts that no plan has.
int check_group(const Jobs& jobs, uint32_t n) {
  const int count = static_cast<int>(jobs.size());
  for (uint32_t most_parts : {1u, 4u, kMostParts}) {
    if (most_parts > 1 && count > 1) continue;
    for (bool transposed : {false, true}) {
      for (uint32_t multiprocessors : {132u, 7u}) {
        const WidePlan plan = best_wide_plan(jobs.data(), count, n, transposed, most_parts, multiprocessors);
        if (plan.parts < 1 || plan.parts > most_parts || plan.parts > steps_of(jobs[0].k)) return 10;
        if (!known(plan.tile)) return 11;
        if (const int wrong = covered_once(plan, jobs, n)) return wrong;
      }
    }
  }
  for (const TileSize& tile : kTileSizes) {
    for (uint32_t parts : {1u, 3u, 8u}) {
      if (parts > 1 && (count > 1 || parts > steps_of(jobs[0].k))) continue;
      if (const int wrong = covered_once(make_plan(jobs.data(), count, n, tile, parts), jobs, n)) return wrong;
    }
  }
  return 0;
}

int main() {
  const std::vector<Jobs> groups = {
      {{32, 32}},
      {{4096, 4096}, {4096, 4096}, {4096, 4096}, {128, 4096}, {128, 4096}, {480, 4096}, {96, 4096}},
      {{4096, 480}, {4096, 128}, {4096, 128}, {4096, 96}},
      {{1024, 1024}, {1024, 1024}, {1024, 1024}, {64, 1024}, {64, 1024}, {128, 1024}, {32, 1024}},
      {{16384, 4096}}, {{4096, 16384}}, {{4096, 4096}}, {{65536, 4096}}, {{1056, 544}},
  };
  for (const Jobs& jobs : groups) {
    for (uint32_t n : {1u, 8u, 17u, 33u, 64u, 65u, 128u, 129u, 160u, 320u, 512u, 960u, 1000u, 6000u}) {
      if (const int wrong = check_group(jobs, n)) return wrong;
    }
  }
  // What a layer of 4096 channels gets on 132 multiprocessors: most of them, in whole rounds.
  for (uint32_t n : {128u, 320u, 960u}) {
    const uint32_t most_parts = n > 512 ? 1 : kMostParts;
    const uint32_t units = best_wide_plan(groups[5].data(), 1, n, true, most_parts, 132).first[1];
    if (units * 100 < divide_up(units, 132) * 132 * 90) return 12;
  }
  std::puts("right");
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_everything_once(tmp_path: Path) -> None:
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    flags = ["-std=c++20", "-O2", "-Wall", "-Werror", f"-I{CSRC}"]
    subprocess.run(["c++", *flags, "-o", tmp_path / "plan", tmp_path / "plan.cpp"], check=True, timeout=100)
    done = subprocess.run([tmp_path / "plan"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "right\n")

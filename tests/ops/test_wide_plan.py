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

// 0 where every tile of 32 rows by 32 tokens of every product is in one unit's tile, and every step in one part.
int covered_once(const WidePlan& plan, const Jobs& jobs, uint32_t n) {
  std::vector<std::vector<int>> times;
  for (const WideJob& job : jobs) times.emplace_back(divide_up(job.m, 32) * divide_up(n, 32));
  for (uint32_t unit = 0; unit < plan.first[kMostJobs]; unit++) {
    const WidePlace place = place_of(plan, unit);
    if (place.job >= jobs.size()) return 1;
    std::vector<int> seen(plan.team.blocks());
    for (uint32_t block = 0; block < plan.team.blocks(); block++) {
      const WideRank me(plan.team, block);
      if (me.block(plan.team, me.row, me.token, me.part) != block) return 2;
      if (me.part != 0) continue;
      const uint32_t row0 = place.row + me.row * plan.tile.rows, token0 = place.token + me.token * plan.tile.tokens;
      for (uint32_t row = row0; row < row0 + plan.tile.rows && row < jobs[place.job].m; row += 32) {
        // Tiles may begin within 32 tokens of each other: the one with the first token counts.
        for (uint32_t token = 0; token < n; token += 32) {
          if (token >= token0 && token < token0 + plan.tile.tokens) {
            times[place.job][row / 32 * divide_up(n, 32) + token / 32]++;
          }
        }
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
    for (uint32_t part = 0; part < plan.team.parts; part++) {
      const RowRange steps = steps_of_part(job.k, part, plan.team.parts);
      if (steps.begin != step || steps.end == steps.begin) return 4;
      step = steps.end;
    }
    if (step * kStepTerms < job.k || (step - 1) * kStepTerms >= job.k) return 5;
  }
  return 0;
}

int main() {
  const std::vector<Jobs> groups = {
      {{32, 32}},
      {{4096, 4096}, {4096, 4096}, {4096, 4096}, {128, 4096}, {128, 4096}, {480, 4096}, {96, 4096}},
      {{4096, 480}, {4096, 128}, {4096, 128}, {4096, 96}},
      {{1024, 1024}, {1024, 1024}, {1024, 1024}, {64, 1024}, {64, 1024}, {128, 1024}, {32, 1024}},
      {{16384, 4096}}, {{4096, 16384}}, {{4096, 4096}}, {{65536, 4096}},
  };
  const WideGpu whole{{132, 66, 32, 16}}, small{{7, 0, 0, 0}};
  for (const Jobs& jobs : groups) {
    const int count = static_cast<int>(jobs.size());
    for (uint32_t n : {1u, 64u, 65u, 128u, 129u, 160u, 320u, 512u, 960u, 1000u, 6000u}) {
      for (const WideGpu& gpu : {whole, small}) {
        const WidePlan plan = best_wide_plan(jobs.data(), count, n, gpu);
        if (gpu.of(plan.team.blocks()) == 0 || !plan_possible(plan, jobs.data(), count)) return 10;
        if (const int wrong = covered_once(plan, jobs, n)) return wrong;
        if (n <= 128 && plan.tile.tokens > 2 * 128) return 11;
      }
      for (const TileSize& tile : kTileSizes) {
        const WidePlan plan = make_plan(jobs.data(), count, n, tile, {2, 2, 1});
        if (const int wrong = covered_once(plan, jobs, n)) return wrong;
      }
    }
  }
  // What a layer of 4096 channels gets on 132 multiprocessors: most of them, in whole rounds.
  for (uint32_t n : {128u, 320u, 960u}) {
    const WidePlan plan = best_wide_plan(groups[5].data(), 1, n, whole);
    const uint32_t blocks = plan.first[kMostJobs] * plan.team.blocks(), rounds = divide_up(blocks, 132);
    if (blocks * 100 < rounds * 132 * 90) return 12;
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

"""csrc/products_plan.h, on the host: every row of every product is computed once, and the shares are equal."""

import shutil
import subprocess
from pathlib import Path

import pytest

import cog_rwkv_ops

CSRC = Path(cog_rwkv_ops.__file__).parent / "csrc"
PROGRAM = r"""
#include "products_plan.h"

#include <cstdio>
#include <vector>

using namespace cog_rwkv;

struct Size {
  uint32_t m, k;
};

int main() {
  const std::vector<std::vector<Size>> groups = {
      {{32, 32}},
      {{4096, 4096}, {4096, 4096}, {4096, 4096}, {128, 4096}, {128, 4096}, {480, 4096}, {96, 4096}},
      {{4096, 128}, {4096, 128}, {4096, 480}, {4096, 96}},
      {{65536, 4096}},
      {{32, 16384}, {4096, 32}, {64, 4128}, {32, 32}},
  };
  for (const auto& group : groups) {
    for (uint32_t teams : {1u, 7u, 16u, 33u, 108u, 132u}) {
      for (uint32_t most : {16u, 32u}) {
        uint64_t units = 0;
        for (const Size& s : group) units += product_units(s.m, s.k);
        const TeamShares shares = share_units(units, teams);
        std::vector<uint64_t> work(teams);
        uint64_t widest = 0;
        uint32_t before = 0;
        for (const Size& s : group) {
          std::vector<int> times(s.m);
          for (uint32_t team = 0; team < teams; team++) {
            const RowRange rows = rows_of_team(s.m, s.k, before, shares.begin(team), shares.begin(team + 1));
            const uint32_t split = most == 16 ? column_split(s.k) : 0;
            const WarpPlan plan = plan_warps(rows, split, most);
            work[team] += uint64_t{rows.end - rows.begin} / kRowsAtOnce * (s.k / kChunk);
            for (uint32_t round = 0; round < plan.rounds; round++) {
              for (uint32_t warp = 0; warp < kProductWarps; warp++) {
                const RowRange tile = plan.tile_of(round, warp);
                if (tile.end - tile.begin > most || tile.begin % 4 != 0 || tile.end > s.m) return 1;
                const uint32_t part = warp & ((1u << split) - 1);
                for (uint32_t row = tile.begin; row < tile.end; row++) times[row] += part == 0;
              }
            }
            uint32_t chunk = 0;
            for (uint32_t part = 0; part < 1u << split; part++) {
              const RowRange chunks = part_of(s.k / kChunk, part, split);
              if (chunks.begin != chunk) return 2;
              chunk = chunks.end;
            }
            if (chunk != s.k / kChunk) return 3;
          }
          for (int count : times) {
            if (count != 1) return 4;
          }
          before += product_units(s.m, s.k);
          widest = s.k / kChunk > widest ? s.k / kChunk : widest;
        }
        for (uint64_t each : work) {
          if (each > units / teams + 1 + widest) return 5;
        }
      }
    }
  }
  std::puts("right");
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_every_row_once(tmp_path: Path) -> None:
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    command = [
        "c++",
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Werror",
        f"-I{CSRC}",
        "-o",
        tmp_path / "plan",
        tmp_path / "plan.cpp",
    ]
    subprocess.run(command, check=True, timeout=100)
    done = subprocess.run([tmp_path / "plan"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "right\n")

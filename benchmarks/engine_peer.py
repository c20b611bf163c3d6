"""The peer of ``benchmarks/engine.py``: the engine in the PyPI package rwkv-quant-nv, run by its own script.

``rwkv7_fast_v3a.py`` compiles its kernels when it starts (it needs nvcc and ninja), reads a .pth, and prints a line
``csv,NAME,B,T,iterations,p10,p50,p90,tokens/s`` a case, in milliseconds of a replayed CUDA graph. Its embedding lies on
the host and is looked up before the graph. Weights, activations and states are float16.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine_cells import Cell

PACKAGE, VERSION, SCRIPT = "rwkv-quant-nv", "1.2.1", "rwkv7_fast_v3a.py"
HOW_TO_GET = (
    f"no peer: {SCRIPT} is not here; pip install --no-deps {PACKAGE}=={VERSION}, or unpack its wheel and name the "
    "folder with --peer-folder"
)
STATE_DTYPE = "float16"
# The two ways in which it is run; the better one of a cell counts.
VARIANTS = {"default": (), "auto": ("--batched-rkv", "auto", "--cmix-sparse", "auto")}
COMPILE = "import rwkv7_fast_v3a as peer; peer.load_extensions('fp16')"


def find(folder: Path | None = None) -> Path | None:
    """The folder with the peer's script: ``folder``, or where the package is installed; None where it is in neither."""
    if folder is not None:
        return folder if (folder / SCRIPT).is_file() else None
    spec = importlib.util.find_spec(Path(SCRIPT).stem)
    return Path(spec.origin).parent if spec and spec.origin else None


def name(folder: Path) -> str:
    """The peer in a row of results: its version is read from the metadata beside its script."""
    found = list(importlib.metadata.distributions(name=PACKAGE, path=[str(folder)]))
    return f"{PACKAGE} {found[0].version if found else 'of unknown version'}"


def read_times(lines: Iterable[str]) -> dict[Cell, float]:
    """Median milliseconds by cell, from what the script prints."""
    times = {}
    for line in lines:
        parts = line.strip().split(",")
        if parts[0] == "csv" and len(parts) == 9:
            times[Cell(int(parts[2]), int(parts[3]))] = float(parts[6])
    return times


def best(runs: Iterable[dict[Cell, float]]) -> dict[Cell, float]:
    """The least time of each cell."""
    found: dict[Cell, float] = {}
    for times in runs:
        found |= {cell: min(ms, found.get(cell, ms)) for cell, ms in times.items()}
    return found


@dataclass
class Peer:
    """The peer's script in ``folder``, run in other processes; its compiled kernels are kept in ``build``."""

    folder: Path
    build: Path
    _compiler: subprocess.Popen[str] | None = field(default=None, init=False)

    def start_compiling(self) -> None:
        """Begin to compile its kernels, beside whatever runs meanwhile."""
        self.build.mkdir(parents=True, exist_ok=True)
        log = (self.build / "compile.log").open("w")
        self._compiler = subprocess.Popen(
            [sys.executable, "-c", COMPILE], cwd=self.folder, env=self._environment(), stdout=log, stderr=log, text=True
        )
        log.close()

    def compiled(self, seconds: float) -> str | None:
        """Wait for that; None when it is done, else what went wrong in one line."""
        if self._compiler is None:
            return None
        log = self.build / "compile.log"
        try:
            code = self._compiler.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            self.stop()
            return f"the peer's kernels were not compiled in time; {log} has more"
        last = (log.read_text(errors="replace").strip() or "nothing was printed").splitlines()[-1]
        return None if code == 0 else f"the peer's kernels did not compile: {last} ({log} has more)"

    def stop(self) -> None:
        """End a compilation that nobody waits for any more."""
        if self._compiler is not None and self._compiler.poll() is None:
            self._compiler.kill()
            self._compiler.wait()
            for lock in self.build.rglob("lock"):  # torch would wait for whoever made it
                lock.unlink()

    def run(self, model: Path, cells: Sequence[Cell], variant: str, seconds: float) -> dict[Cell, float]:
        """Milliseconds of those cells that it finished within ``seconds``; says on stderr why others are missing."""
        command = [sys.executable, SCRIPT, "--model", str(model.resolve()), "--warmup", "2", "--iters", "20"]
        command += ["--cases", ",".join(map(str, cells)), *VARIANTS[variant]]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        begin, timer = time.monotonic(), threading.Timer(max(seconds, 0.1), process.kill)
        timer.start()
        try:
            lines = list(process.stdout or ())
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        times = read_times(lines)
        if missing := [str(cell) for cell in cells if cell not in times]:
            last = lines[-1].strip() if lines else "it printed nothing"
            print(
                f"peer ({variant}): no time for {', '.join(missing)} after {time.monotonic() - begin:.0f} s, "
                f"exit code {code}: {last}",
                file=sys.stderr,
            )
        return times

    def _environment(self) -> dict[str, str]:
        """Ours, with this Python's ninja on PATH, and without the variables by which ours is built."""
        kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_NVCC", "CXX")}
        path = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", os.defpath)
        return {**kept, "PATH": path, "TORCH_EXTENSIONS_DIR": str(self.build.resolve())}

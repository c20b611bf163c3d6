"""The registers, stack and shared memory of the compiled CUDA kernels, against those that were recorded. Needs no GPU.

    python -m script.kernels [LIBRARY]           compare; LIBRARY is ops/cog_rwkv_ops/_cuda.abi3.so where none is named
    python -m script.kernels [LIBRARY] --record  record them: benchmarks/guard/kernels.json

What the compiler gave each kernel is read from the library by cuobjdump: beside nvcc, on PATH, or PyPI's
nvidia-cuda-cuobjdump. Stack is what a thread spills to memory, and the arrays that it cannot keep in registers. The
instances of a kernel for its dtypes and sizes are taken together. Another compiler gives other numbers: then nothing is
compared, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "ops/cog_rwkv_ops/_cuda.abi3.so"
RECORDED = ROOT / "benchmarks/guard/kernels.json"
ARCHITECTURE = "sm_90a"
# Of the instances of a kernel: how many, the most registers a thread, bytes of stack of all, the most shared memory.
Usage = dict[str, int]
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class NotComparedError(Exception):
    """There is nothing to compare, for the reason that the message gives."""


def find_cuobjdump(nvcc: Path | None) -> Path | None:
    """Beside the compiler, on PATH, or PyPI's in this environment."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin/cuobjdump"
    beside = nvcc.resolve().with_name("cuobjdump") if nvcc else None
    for candidate in (beside, shutil.which("cuobjdump"), packaged):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


def base_name(symbol: str) -> str:
    """The name of a kernel in a mangled symbol, without namespaces, template arguments and parameters."""
    rest, name = re.sub(r"^_Z(N?K?)", "", symbol), symbol
    while match := re.match(r"\d+", rest):
        end = match.end() + int(match[0])
        name, rest = rest[match.end() : end], rest[end:]
    return name


def read_usage(lines: Iterable[str], architecture: str = ARCHITECTURE) -> dict[str, Usage]:
    """By kernel, from what ``cuobjdump --dump-resource-usage`` prints of one architecture."""
    kernels: dict[str, Usage] = {}
    name, wanted = "", False
    for line in map(str.strip, lines):
        if line.startswith("arch = "):
            wanted = line.removeprefix("arch = ") == architecture
        elif line.startswith("Function "):
            name = base_name(line.removeprefix("Function ").rstrip(":"))
        elif (found := _USAGE.match(line)) and wanted and name:
            registers, stack, shared = map(int, found.groups())
            usage = kernels.setdefault(name, {"instances": 0, "registers": 0, "stack": 0, "shared": 0})
            usage["instances"] += 1
            usage["registers"] = max(usage["registers"], registers)
            usage["stack"] += stack
            usage["shared"] = max(usage["shared"], shared)
            name = ""
    return dict(sorted(kernels.items()))


def compare(found: dict[str, Usage], recorded: dict[str, Usage]) -> tuple[list[str], list[str]]:
    """(What takes more than recorded, what is not recorded or not there any more)."""
    more, other = [], []
    for kernel, usage in found.items():
        if kernel not in recorded:
            other.append(f"{kernel}: not recorded")
            continue
        before = recorded[kernel]
        for what in ("registers", "stack", "shared"):
            # More instances have more stack between them without any of them being worse.
            scale = max(1.0, usage["instances"] / before["instances"]) if what == "stack" else 1.0
            if usage[what] > before[what] * scale:
                more.append(f"{kernel}: {what} {usage[what]}, recorded {before[what]}")
    other += [f"{kernel}: recorded, and not in the library" for kernel in recorded if kernel not in found]
    return more, other


def compiler_version(nvcc: Path) -> str:
    """Such as V13.0.88."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V\d[\d.]*", text)
    return found[0] if found else "unknown"


def find_nvcc() -> Path | None:
    """What ops/setup.py would compile with."""
    command = [sys.executable, str(ROOT / "ops/nvcc.py")]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Path(text) if text else None


def usage_of(library: Path) -> tuple[str, dict[str, Usage]]:
    """(The compiler's version, the usage by kernel). Raises NotComparedError where they cannot be told."""
    nvcc = find_nvcc()
    if not library.exists() or nvcc is None:
        raise NotComparedError(f"no {library.name} or no nvcc here")
    tool = find_cuobjdump(nvcc)
    if tool is None:
        raise NotComparedError("no cuobjdump beside nvcc, on PATH or from PyPI's nvidia-cuda-cuobjdump")
    command = [str(tool), "--dump-resource-usage", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = read_usage(text.splitlines())
    if not kernels:
        raise NotComparedError(f"{library.name} has no code for {ARCHITECTURE}")
    return compiler_version(nvcc), kernels


def check(library: Path) -> tuple[list[str], list[str]]:
    """As ``compare``, with the recorded usage. Raises NotComparedError where nothing can be compared."""
    version, kernels = usage_of(library)
    recorded = json.loads(RECORDED.read_text())
    if version != recorded["compiler"]:
        raise NotComparedError(f"nvcc is {version}, and the record is of {recorded['compiler']}")
    return compare(kernels, recorded["kernels"])


def record(library: Path) -> None:
    """Write the usage down. Raises NotComparedError where it cannot be told."""
    version, kernels = usage_of(library)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(usage)}" for name, usage in kernels.items())
    RECORDED.write_text(
        f'{{\n "compiler": "{version}",\n "architecture": "{ARCHITECTURE}",\n "kernels": {{\n{lines}\n }}\n}}\n'
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, default=LIBRARY)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    try:
        if args.record:
            record(args.library)
        more, other = check(args.library)
    except NotComparedError as reason:
        print(f"kernels: not compared: {reason}")
        return 1 if args.record else 0
    print("\n".join([*other, *(f"MORE: {line}" for line in more)]) or "kernels: as recorded")
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(main())

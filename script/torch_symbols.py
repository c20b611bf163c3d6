"""Which functions of PyTorch the compiled operators call, and whether older and newer versions have them.

    python script/torch_symbols.py 2.10.0 2.15.0

takes the wheel of each version for Linux on ARM, which PyPI has as a CPU build (150 MB; those for x86-64 bring CUDA and
gigabytes), and looks into its libraries: the names of C functions do not depend on the processor. The last line says
whether all are there. Tests do the same with the headers of the PyTorch that is installed, which say for each function
the version that it came with.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = (
    "torch/csrc/stable/c/shim.h",
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
)
NAME = re.compile(r"\b((?:aoti_torch|torch)_\w+)\s*\(")


def undefined(library: Path) -> set[str]:
    """The names that a shared library takes from others, without those of glibc and gcc and without weak ones."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    pairs = (line.split() for line in listed.splitlines())
    return {name for kind, name in pairs if kind == "U" and "@" not in name}


def declared(include: Path, target: str) -> set[str]:
    """The C functions that the headers in ``include`` give to who compiles for version ``target``, as "2.10"."""
    major, minor = (int(part) for part in target.split("."))
    version = f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000"
    source = "".join(f"#include <{header}>\n" for header in HEADERS)
    command = ["c++", "-std=c++20", "-E", "-P", version, f"-I{include}", "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return set(NAME.findall(done.stdout))


def exported(libraries: Iterable[Path]) -> set[str]:
    """The names that shared libraries have for others."""
    found: set[str] = set()
    for library in libraries:
        command = ["nm", "-D", "--defined-only", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found |= {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    return found


def wheel_libraries(version: str, folder: Path) -> list[Path]:
    """libtorch of one version, fetched into ``folder``. Raises CalledProcessError where pip has none."""
    platform = ["--platform", "manylinux_2_28_aarch64", "--python-version", "3.12", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *platform]
    subprocess.run([*command, "--dest", str(folder), f"torch=={version}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if re.fullmatch(r"torch/lib/lib(torch_cpu|c10)\.so", n)]
        return [Path(archive.extract(name, folder)) for name in names]


def main(versions: list[str]) -> int:
    """0 where every version has every function."""
    libraries = sorted((ROOT / "ops" / "cog_rwkv_ops").glob("_*.so"))
    if not libraries or not versions:
        print(__doc__ if not versions else "the operators are not compiled: script/build-ops")
        return 2
    needed = set().union(*(undefined(library) for library in libraries))
    failed = 0
    for version in versions:
        try:
            with tempfile.TemporaryDirectory() as folder:
                lacking = needed - exported(wheel_libraries(version, Path(folder)))
        except subprocess.CalledProcessError:
            print(f"torch {version}: pip has no such wheel here")
            failed += 1
            continue
        failed += bool(lacking)
        print(f"torch {version}: has {len(needed - lacking)} of {len(needed)} functions", *sorted(lacking))
    print(f"torch_symbols: {'failed' if failed else 'passed'}: {', '.join(path.name for path in libraries)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

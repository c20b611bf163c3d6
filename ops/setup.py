"""Compiles every operator folder into two libraries: cog_rwkv_ops/_cpu.abi3.so and _cuda.abi3.so.

    pip install --no-build-isolation --no-deps ./ops      (the one build)
    script/build-ops                                      (the same, editable and incremental)

COG_RWKV_CUDA=1 makes a missing nvcc an error, COG_RWKV_CUDA=0 leaves CUDA out, unset builds it where
there is an nvcc. TORCH_CUDA_ARCH_LIST overrides the architectures. No GPU is needed or looked at.
"""

import fcntl
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

try:
    from torch.utils import cpp_extension
except ImportError as missing:
    raise SystemExit(
        f"cog_rwkv_ops: torch cannot be imported ({missing}). The operators are compiled beside the torch that is "
        "installed: install torch, then build with: pip install --no-build-isolation --no-deps ./ops"
    ) from None

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # not there when pip builds
from nvcc import find_nvcc  # noqa: E402

ARCHITECTURES = "8.0 8.6 8.9 9.0a 10.0 12.0+PTX"
# The oldest torch whose stable ABI we use: what is built here runs on it and on newer ones.
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000")]

# Flags meant for other programs must not decide how these files are compiled: Cog exports
# CFLAGS="-O3 -funroll-loops -fno-strict-aliasing -flto -S", and -S alone would leave no object file.
for variable in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"):
    os.environ.pop(variable, None)


# The ninja of this environment, also where a Python is called by its path: another version of ninja would not
# trust this one's records and compile everything again.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", os.defpath)


def say(line: str) -> None:
    print(f"cog_rwkv_ops: {line}", file=sys.stderr, flush=True)


def wanted_nvcc() -> Path | None:
    """nvcc where the CUDA library is to be built, None where it is not; the reason in one line."""
    choice = os.environ.get("COG_RWKV_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"cog_rwkv_ops: COG_RWKV_CUDA is {choice!r}; it must be 0, 1 or unset")
    if choice == "0":
        say("building for the CPU only: COG_RWKV_CUDA=0")
        return None
    nvcc = find_nvcc()
    if nvcc is None and choice == "1":
        raise SystemExit(
            "cog_rwkv_ops: COG_RWKV_CUDA=1, but there is no nvcc in CUDA_HOME, on PATH, in /usr/local/cuda or in "
            'site-packages/nvidia/cu13; install one with: pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"'
        )
    if nvcc is None:
        say("building for the CPU only: no nvcc in CUDA_HOME, on PATH, in /usr/local/cuda or site-packages/nvidia/cu13")
    return nvcc


def toolkit_root(nvcc: Path) -> Path:
    """The folder of the toolkit. nvcc itself tells: the file on PATH may be a wrapper or a link."""
    lines = subprocess.run([nvcc, "-dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.*)$", lines, re.MULTILINE)
    return Path(match[1]).resolve() if match else nvcc.resolve().parent.parent


def architectures(nvcc: Path) -> str:
    """ARCHITECTURES, less those that this nvcc does not know yet."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    names = ARCHITECTURES.split()
    kept = [n for n in names if f"compute_{re.sub('[^0-9]', '', n.split('+')[0])}" in known]
    if not kept:
        return ARCHITECTURES
    if kept != names:
        say(f"this nvcc does not know {', '.join(n for n in names if n not in kept)}: left out")
    return " ".join([*kept[:-1], kept[-1].removesuffix("+PTX") + "+PTX"])


def sources(suffix: str) -> list[str]:
    """Every operator's file: a new folder needs no entry anywhere. Relative, as setuptools wants it."""
    return sorted(str(p.relative_to(HERE)) for p in (HERE / "cog_rwkv_ops").glob(f"*/*{suffix}"))


def cuda_extension(nvcc: Path, include: list[str], link: list[str]) -> Extension:
    """The CUDA library. Its runtime is linked in, so that it needs no CUDA but the one inside torch."""
    root = toolkit_root(nvcc)
    cpp_extension.CUDA_HOME = str(root)  # torch looks for it itself in its CUDA builds only
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(nvcc))
    say(f"building for CUDA with {nvcc}, architectures {os.environ['TORCH_CUDA_ARCH_LIST']}")
    folders = (root / name for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"))
    static = [str(f) for f in folders if (f / "libcudart_static.a").exists()]
    if not static:
        raise SystemExit(f"cog_rwkv_ops: no libcudart_static.a under {root}; install the CUDA runtime's static library")
    return Extension(
        "cog_rwkv_ops._cuda",
        sources(".cu"),
        include_dirs=[*include, str(root / "include")],
        define_macros=[*MACROS, ("USE_CUDA", None)],
        extra_compile_args={"cxx": [], "nvcc": ["-O3", "-std=c++20", "-Xcompiler=-fvisibility=hidden"]},
        extra_link_args=[*link, f"-L{static[0]}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"],
        py_limited_api=True,
        language="c++",
    )


def extensions() -> list[Extension]:
    """The libraries to build: the CPU's always, CUDA's where there is a compiler for it."""
    nvcc = wanted_nvcc()
    include = cpp_extension.include_paths()
    # torch loads its libraries privately, so ours must name the one it takes symbols from, whatever the linker's
    # default. libtorch_cuda is not named: see csrc/cuda.cuh.
    link = ["-Wl,--no-as-needed", f"-L{cpp_extension.library_paths()[0]}", "-ltorch_cpu"]
    link += ["-Wl,--exclude-libs,ALL", "-Wl,-z,defs"]  # a symbol that nothing defines fails here, not at import
    cxx = ["-O3", "-std=c++20", "-g0", "-Wall", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
    # A product and a sum are fused only where the source says so: otherwise the same formula could round
    # differently in a vector loop and in its tail, and a result would depend on how the work was cut.
    cxx += ["-ffp-contract=off"]
    if platform.machine() == "x86_64":  # the floor; csrc/cpu.h chooses faster code at run time
        cxx += ["-march=x86-64-v2"]
    cpu = Extension(
        "cog_rwkv_ops._cpu",
        sources(".cpp"),
        include_dirs=include,
        define_macros=MACROS,
        extra_compile_args={"cxx": cxx},
        extra_link_args=link,
        py_limited_api=True,
        language="c++",
    )
    return [cpu, cuda_extension(nvcc, include, link)] if nvcc and sources(".cu") else [cpu]


def last_change(source: Path) -> float:
    """When `source`, or a header of ours that it includes, was changed last."""
    times, waiting = {}, [source.resolve()]
    while waiting:
        file = waiting.pop()
        times[file] = file.stat().st_mtime
        found = (file.parent / name for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE))
        waiting += [header.resolve() for header in found if header.exists() and header.resolve() not in times]
    return max(times.values())


class Build(cpp_extension.BuildExtension):
    """torch's ninja build, with object files that stay, so that the next build compiles only what changed."""

    def run(self) -> None:
        (HERE / "build").mkdir(exist_ok=True)
        with (HERE / "build" / "lock").open("w") as lock:  # two builds at once would spoil each other's files
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.remove_other_libraries()
            super().run()

    def remove_other_libraries(self) -> None:
        """A library that an earlier build left, with CUDA say, must not stay beside this one or slip into its wheel."""
        built = {self.get_ext_filename(extension.name) for extension in self.extensions}
        for folder in (Path(self.build_lib), HERE) if self.inplace else (Path(self.build_lib),):
            for old in folder.glob("cog_rwkv_ops/*.so"):
                if str(old.relative_to(folder)) not in built:
                    old.unlink()

    def build_extension(self, ext: Extension) -> None:
        self.build_temp = str(HERE / "build" / ext.name.rpartition(".")[2])
        # torch lets nvcc write dependency files only in its CUDA builds; without them a header's change went unseen.
        for source in ext.sources:
            compiled = Path(self.build_temp, source).with_suffix(".o")
            if source.endswith(".cu") and compiled.exists() and compiled.stat().st_mtime < last_change(HERE / source):
                compiled.unlink()
        super().build_extension(ext)


class Wheel(bdist_wheel):
    """The libraries use nothing of Python's: one wheel serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


os.chdir(HERE)
setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)

"""Replays the order in which Cog builds the image, in a fresh folder and environment, without Docker.

requirements.txt under Cog's CFLAGS; Cog's SDK; the build.run command of cog.yaml over a copy of ops/; the tree as
.dockerignore leaves it; the schema; then the server, which is asked what an image would be asked. The first
thing that does not hold ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from script import cog_schema, kernels
from script.client import STREAM, events
from script.dockerignore import copy_context
from script.server import OWN, CogServer

# The constants of the Dockerfile that Cog 0.23.1 generates.
CFLAGS = "-O3 -funroll-loops -fno-strict-aliasing -flto -S"
UV = "uv==0.9.26"
PROMPT = {"prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0.0}
PROBE = """
import pathlib, cog_rwkv_ops, torch
a = torch.arange(5.0)
assert torch.equal(cog_rwkv_ops.add(a, a), a + a)
print(pathlib.Path(cog_rwkv_ops.__file__).parent)
"""


class CheckError(Exception):
    """Something that the image needs does not hold."""


def check(holds: bool, text: str) -> None:
    """Say what was checked; CheckError where it does not hold."""
    if not holds:
        raise CheckError(text)
    print(f"image-check: holds: {text}", flush=True)


@dataclass
class Image:
    """The stand-in for the image: `folder`/venv is its Python, `folder`/src its /src, `folder`/ops the mounted ops/."""

    folder: Path
    root: Path = cog_schema.ROOT
    config: dict[str, Any] = field(init=False)
    variables: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.config = yaml.safe_load((self.root / "cog.yaml").read_text(encoding="utf-8"))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("COG_", "PYTHON", "TORCH_", "VIRTUAL_ENV"))}
        path = f"{self.folder / 'venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = dict(entry.split("=", 1) for entry in self.config.get("environment", []))
        self.variables = {**kept, "PATH": path, "VIRTUAL_ENV": str(self.folder / "venv"), **environment}

    @property
    def python(self) -> Path:
        """The image's Python."""
        return self.folder / "venv/bin/python"

    def step(self, name: str, command: list[str] | str, **variables: str) -> None:
        """Run one step of the build, its output shown; CheckError when it fails."""
        shown = command if isinstance(command, str) else shlex.join(command)
        print(f"image-check: {name}: {shown}", flush=True)
        begin = time.monotonic()
        done = subprocess.run(
            command, shell=isinstance(command, str), cwd=self.folder, env={**self.variables, **variables}, check=False
        )
        if done.returncode != 0:
            raise CheckError(f"{name} failed with exit code {done.returncode}")
        print(f"image-check: {name}: {time.monotonic() - begin:.0f} s", flush=True)

    def install(self) -> None:
        """The layers before `COPY . /src`."""
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--progress-bar=off"]
        requirements = self.config["build"]["python_requirements"]
        self.step("environment", [sys.executable, "-m", "venv", str(self.folder / "venv")])
        self.step("requirements", [*pip, "-r", str(self.root / requirements)], CFLAGS=CFLAGS)
        self.step("Cog's SDK and uv", [*pip, f"cog=={self.config['build']['sdk_version']}", UV], CFLAGS="")

    def compile_operators(self, all_architectures: bool) -> None:
        """The `build.run` entry, as Docker would run it."""
        extra = {"CFLAGS": ""}
        if not all_architectures:
            extra["TORCH_CUDA_ARCH_LIST"] = "9.0a"
        if not self.has_nvcc():
            print("image-check: NO NVCC ON THIS MACHINE: COG_RWKV_CUDA=0, the CUDA library is not checked", flush=True)
            extra["COG_RWKV_CUDA"] = "0"
        copy_context(self.root, self.folder / "context")
        for entry in self.config["build"]["run"]:
            mount, command = split_run(entry)
            if mount:
                shutil.copytree(self.folder / "context" / mount["source"], self.folder / "ops", dirs_exist_ok=True)
                command = re.sub(rf"(?<=\s){re.escape(mount['target'])}(?=\s|$)", str(self.folder / "ops"), command)
            self.step("build.run", command, **extra)
        shutil.rmtree(self.folder / "ops")  # a mount is gone after its step

    def has_nvcc(self) -> bool:
        """Whether ops/setup.py, run by the image's Python, finds a CUDA compiler."""
        command = [self.python, self.root / "ops/nvcc.py"]
        return subprocess.run(command, env=self.variables, stdout=subprocess.DEVNULL, check=False).returncode == 0

    def copy_source(self) -> None:
        """`COPY . /src` and the layer with the schema."""
        (self.folder / "context").rename(self.folder / "src")
        cog_schema.write(self.folder / "src")


def split_run(entry: str) -> tuple[dict[str, str], str]:
    """A `build.run` entry as (the fields of its --mount, the command without RUN's own options)."""
    mount: dict[str, str] = {}
    while (option := re.match(r"--(\w+)=(\S+)\s+", entry)) is not None:
        if option[1] == "mount":
            mount = dict(part.partition("=")[::2] for part in option[2].split(","))
        entry = entry[option.end() :]
    return mount, entry.strip()


def check_library(image: Image) -> None:
    """The operators come from site-packages, whatever stands in /src, and both libraries are there."""
    source = image.folder / "src"
    check(not list(source.rglob("*.so")), "no library of this checkout is in /src")
    found = subprocess.run(
        [image.python, "-c", PROBE], cwd=source, env=image.variables, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise CheckError(f"an operator cannot be called: {found.stderr}")
    where = Path(found.stdout.strip().splitlines()[-1])
    check("site-packages" in where.parts, f"the operators in use are the installed ones ({where})")
    libraries = {path.name.partition(".")[0] for path in where.glob("*.so")}
    check("_cpu" in libraries, "the CPU library is installed")
    if image.has_nvcc():
        check("_cuda" in libraries, "the CUDA library is installed")
        check_kernels(next(where.glob("_cuda.*so")))


def check_kernels(library: Path) -> None:
    """No kernel takes more registers, stack or shared memory than was recorded."""
    try:
        more, other = kernels.check(library)
    except kernels.NotComparedError as reason:
        print(f"image-check: NOT CHECKED: registers and stack of the kernels: {reason}", flush=True)
        return
    for line in other:
        print(f"image-check: {line}", flush=True)
    check(not more, f"no kernel takes more than recorded {more or ''}".rstrip())


def check_server(server: CogServer) -> None:
    """Health, schema, one plain prediction and one stream."""
    health = OWN.get(f"{server.url}/health-check").json()
    check(health["status"] == "READY", "health-check says READY")
    document = OWN.get(f"{server.url}/openapi.json").json()
    operation = document["paths"]["/predictions"]["post"]
    check("prompt" in document["components"]["schemas"]["Input"]["properties"], "/openapi.json has the inputs")
    check(operation.get("x-cog-streaming") is True, "/openapi.json offers streams")
    answer = OWN.post(f"{server.url}/predictions", json={"input": PROMPT}, timeout=300).json()
    check(answer["status"] == "succeeded" and "".join(answer["output"]) != "", "a plain prediction succeeds")
    call = OWN.stream("POST", f"{server.url}/predictions", json={"input": PROMPT}, headers=STREAM, timeout=300)
    with call as response:
        stream = list(events(response))
    text = "".join(data["chunk"] for event, data in stream if event == "output")
    completed = [data for event, data in stream if event == "completed"]
    check(len(completed) == 1 and completed[0]["status"] == "succeeded", "a stream ends with one completed event")
    check(text == "".join(answer["output"]), "the streamed text is the plain prediction's")
    refused = OWN.post(f"{server.url}/predictions", json={"input": {**PROMPT, "max_tokens": 0}})
    check(refused.status_code == 422, "a value past its bound is refused")


def run(image: Image, all_architectures: bool) -> None:
    """Build and check."""
    image.install()
    image.compile_operators(all_architectures)
    image.copy_source()
    check_library(image)
    server = CogServer(image.folder / "src", str(image.python), image.variables)
    with server:
        try:
            check_server(server)
        except (CheckError, httpx.HTTPError, KeyError) as error:
            raise CheckError(f"{error}\nThe server's log ends:\n{server.tail()}") from error


def main() -> int:
    """Command line of script/image-check."""
    parser = argparse.ArgumentParser(prog="script/image-check", description=__doc__)
    parser.add_argument("--all-archs", action="store_true", help="compile for every GPU that the image supports")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="image-check-") as folder:
        try:
            run(Image(Path(folder)), options.all_archs)
        except (CheckError, RuntimeError, OSError) as error:
            print(f"image-check: FAILED: {error}", file=sys.stderr)
            return 1
    print(f"image-check: passed in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the CUDA compiler is. setup.py and the scripts ask here, so that they agree:

python nvcc.py prints its path; without one it prints nothing and exits with 1.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def find_nvcc() -> Path | None:
    """The CUDA compiler: in CUDA_HOME, on PATH, in /usr/local/cuda, or PyPI's in this environment."""
    home = os.environ.get("CUDA_HOME")
    pypi = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvcc"
    for candidate in (home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", pypi):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


if __name__ == "__main__":
    found = find_nvcc()
    if found is None:
        sys.exit(1)
    print(found)

"""Builds the C++ half of the stand-in for torch's CUDA backend, for the installed torch."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("backend.cpp")
BUILD = Path(__file__).parents[4] / "build" / "simulators"


def build() -> Path:
    """Return the library, built unless made of this source. RuntimeError with g++'s output.

    Times of files are not compared: a copy of the sources may have older ones than the library.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"torch_cuda-{torch.__version__}.so"
    made_of = library.with_suffix(".sha256")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    with (BUILD / "torch_cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists() and made_of.exists() and made_of.read_text() == digest:
            return library
        folders = [f"-I{one}" for one in include_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        libraries = Path(torch.__file__).parent / "lib"
        command = [
            *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", abi, *folders, str(SOURCE)),
            *("-o", str(library), f"-L{libraries}", "-ltorch_cpu", "-lc10", "-ltorch"),
            f"-Wl,-rpath,{libraries}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            library.unlink(missing_ok=True)
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        made_of.write_text(digest)
    return library

"""Builds the compiled part of the probes with nvcc, and loads it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from probing import ProbeFailed

FOLDER = Path(__file__).parent
LIBRARY_VARIABLE = "OFFLOAD_PROBES_LIBRARY"
"""The environment variable by which the processes of the probes find the library."""

_SOURCES = ("probe_pool.cu", "probe_graphs.cu")
_UPDATE_SOURCES = ("probe_updates.cu",)
_BUILD_SECONDS = 150


def find_nvcc() -> str:
    """Return the compiler: on the PATH, or in CUDA_HOME.

    Raises:
        ProbeFailed: no compiler found.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise ProbeFailed("nvcc is not on the PATH and not under CUDA_HOME: install CUDA's toolkit")
    return found


def build_library(folder: Path, architecture: str) -> tuple[Path, str]:
    """Compile for an architecture such as `sm_90`.

    Returns:
        The library, and why it was built without device-side updates (empty: it has them).

    Raises:
        ProbeFailed: the compiler is missing or refuses the sources.
    """
    library = folder / f"probes_{architecture}.so"
    whole = _compile(library, architecture, (*_SOURCES, *_UPDATE_SOURCES), ["-lcudadevrt"])
    if not whole:
        return library, ""
    problem = _compile(library, architecture, _SOURCES, [])
    if problem:
        raise ProbeFailed(f"nvcc: {problem}")
    return library, whole


def _compile(
    library: Path, architecture: str, sources: tuple[str, ...], libraries: list[str]
) -> str:
    # The driver's functions stay undefined: libcuda.so.1 is in the process, and a machine that
    # compiles need not have it.
    command = [find_nvcc(), "-O2", "-std=c++17", f"-arch={architecture}", "-rdc=true", "-shared"]
    command += ["-Xcompiler", "-fPIC", "-o", str(library)]
    # NVIDIA's pip packages have the libraries there; nvcc searches lib64.
    command.append(f"-L{Path(command[0]).resolve().parents[1] / 'lib'}")
    command += [str(FOLDER / source) for source in sources] + libraries
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
    )
    if done.returncode == 0:
        return ""
    return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])


def load_library() -> ctypes.CDLL:
    """The library that the environment names, with the driver in the process.

    Raises:
        ProbeFailed: the library does not exist.
    """
    path = os.environ.get(LIBRARY_VARIABLE, "")
    if not path:
        raise ProbeFailed("the compiled part of the probes is missing: nvcc could not build it")
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ProbeFailed(str(error)) from error
    library.probe_pool_malloc.restype = ctypes.c_void_p
    return library

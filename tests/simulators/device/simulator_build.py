"""Builds the simulators of devices where a source has changed."""

from __future__ import annotations

import fcntl
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1]
ROOT = SOURCES.parents[1]
BUILD = ROOT / "build" / "simulators"
LIBRARY = BUILD / "libcuda.so.1"


class SimulatorUnavailable(Exception):
    """The simulated driver cannot replace the real one in this process; the message says why."""


def _tool(name: str) -> str:
    """Return a build tool's path: on PATH, beside the interpreter, or in its Python package."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name) or (str(beside) if beside.exists() else None)
    if found is None:
        try:
            package = importlib.import_module(name)
        except ImportError:
            raise SimulatorUnavailable(f"{name} is needed to build the simulator") from None
        directory = getattr(package, f"{name.upper()}_BIN_DIR", None) or package.BIN_DIR
        found = str(Path(directory) / name)
    return found


def _sources() -> list[Path]:
    files = [path for path in SOURCES.rglob("*") if path.suffix in {".cpp", ".hpp", ".txt"}]
    headers = ROOT / "native"
    return [*files, headers / "cuda" / "driver_abi.hpp", *(headers / "ascend").glob("acl_*.hpp")]


def configure(directory: Path, *options: str) -> None:
    """Configure and build the simulators in `directory`. RuntimeError with compiler output."""
    ninja = _tool("ninja")
    define = [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release", *options]
    for command in (
        [_tool("cmake"), "-S", str(SOURCES), "-B", str(directory), "-G", "Ninja", *define],
        [ninja, "-C", str(directory), "-j", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def build(library: Path = LIBRARY) -> Path:
    """Build the simulators if a source is newer than this library; return its path."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test sessions may begin at once
        newest = max(path.stat().st_mtime for path in _sources())
        if not library.exists() or library.stat().st_mtime < newest:
            configure(BUILD)
            library.touch()
    return library

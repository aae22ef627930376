"""`offload doctor`: what is available on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from offload.backends import backend_names, find_backend
from offload.commands.ranks import ranks_text
from offload.compile.cache import CacheRefused, KernelCache
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.console.text import plain
from offload.errors import BackendUnavailable
from offload.native import _native

_PIPED_WIDTH = 250  # columns


def show_doctor() -> None:
    """Print which devices are available, and the versions that a bug report needs."""
    backends = Table(title="Backends", title_justify="left")
    for title in ("device", "available", "what it is"):
        backends.add_column(title)
    for name in backend_names():
        try:
            machine = find_backend(name).machine()
        except BackendUnavailable as error:
            backends.add_row(name, "no", plain(str(error)))
        else:
            backends.add_row(name, "yes", plain(machine.name))
    versions = Table(title="\nVersions", title_justify="left", show_header=False)
    versions.add_column()
    versions.add_column(overflow="fold")
    for what, found in _versions():
        versions.add_row(what, plain(found))
    # Piped output does not break paths over lines.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(backends)
    console.print(versions)


def _versions() -> list[tuple[str, str]]:
    return [
        ("offload", importlib.metadata.version("offload")),
        ("compiled against torch", _native.torch_version),
        ("torch", torch.__version__),
        ("python", sys.version.split()[0]),
        ("system", platform.platform()),
        ("processor", _processor_name()),
        ("vector instructions", torch.backends.cpu.get_cpu_capability()),
        ("threads", str(torch.get_num_threads())),
        ("ranks", ranks_text()),
        ("compiler of kernels", _found_or_why(lambda: " ".join(find_compiler().command))),
        ("cache of kernels", _found_or_why(lambda: str(KernelCache().folder))),
    ]


def _found_or_why(find: Callable[[], str]) -> str:
    """What was found, or in parentheses why nothing was: fusion works without it."""
    try:
        return find()
    except (CompilerMissing, CacheRefused) as error:
        return f"({error})"


def _processor_name() -> str:
    """The processor's name according to the kernel; other than on Linux its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()

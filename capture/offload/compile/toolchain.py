"""This machine's C++ compiler, which makes a shared object from kernels' sources."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).parent / "kernels"
"""The headers of our kernel templates."""

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-tree-loop-vectorize",
    "-DNDEBUG",
    "-w",
)
"""Vectors are explicit in all sources; the other flags are those of Inductor."""

EXPORTED = 'extern "C" __attribute__((visibility("default")))'
"""The beginning of a function that the library exports; all others are hidden."""

_SECONDS = 300


class CompilerMissing(Exception):
    """There is no C++ compiler; the message says where one was looked for."""


class CompilerFailed(Exception):
    """The compiler refused a source; the message is its first error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What sources need besides `FLAGS`."""

    include_folders: tuple[str, ...] = ()
    library_folders: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler that was found.

    Attributes:
        command: its path, and what follows it in CXX.
        identity: changes if another one is installed.
    """

    command: tuple[str, ...]
    identity: str

    @property
    def is_clang(self) -> bool:
        """Whether its thread functions differ from GCC's."""
        return "clang" in self.identity

    @functools.cached_property
    def as_one_path(self) -> str:
        """The same compiler as a single path: a script if the command has several words."""
        if len(self.command) == 1:
            return self.command[0]
        folder = tempfile.mkdtemp(prefix="offload-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        script = Path(folder) / "c++"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(self.command)} "$@"\n')
        script.chmod(0o700)
        return str(script)


@functools.cache
def find_compiler() -> Compiler:
    """The compiler that CXX names, or else the first of g++, c++ and clang++ on PATH.

    Raises:
        CompilerMissing: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise CompilerMissing(f"no C++ compiler: CXX cannot be read: {error}") from error
    for command in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if path := shutil.which(command[0]):
            found = (path, *command[1:])
            return Compiler(found, " ".join(map(_identity, found)))
    raise CompilerMissing(
        f"no C++ compiler: {'CXX names ' + named[0] if named else 'g++, c++ and clang++'} "
        f"{'which is' if named else 'are'} not on PATH"
    )


def _identity(word: str) -> str:
    """A word of a command; for a program, as `g++` in `ccache g++`, with its file's identity."""
    path = shutil.which(word)
    if path is None:
        return word
    real = Path(path).resolve()
    status = real.stat()
    return f"{real} {status.st_size} {status.st_mtime_ns}"


def build(source: str, options: Options, target: Path) -> None:
    """Compile one source into a shared object.

    Raises:
        CompilerMissing: there is no compiler.
        CompilerFailed: it refused the source, took longer than five minutes, or had no room for its
            output.
    """
    try:
        _build(source, options, target)
    except OSError as error:
        raise CompilerFailed(f"its files cannot be written: {error}") from error


def _build(source: str, options: Options, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        file = Path(folder) / "kernels.cpp"
        file.write_text(source)
        machine_code = Path(folder) / "kernels.o"
        _run(*compile_command(options), "-c", str(file), "-o", str(machine_code))
        # Without -fopenmp: the library must be the one that torch has loaded, and no second one.
        _run(
            *find_compiler().command,
            "-shared",
            str(machine_code),
            "-o",
            str(target),
            *_each("-L", options.library_folders),
            *_each("-l", options.libraries),
        )
    if not target.is_file():
        raise CompilerFailed("it ended without an error, but made no file")


def compile_command(options: Options) -> list[str]:
    """The command that compiles, without its source and target.

    Raises:
        CompilerMissing: there is no compiler.
    """
    return [
        *find_compiler().command,
        *FLAGS,
        *(["-fopenmp"] if most_threads() > 1 else []),
        *options.flags,
        *_each("-I", [str(TEMPLATES), *options.include_folders]),
        *_each("-D", options.definitions),
    ]


def precompile(headers: str, options: Options, target: Path) -> list[str]:
    """Write precompiled headers, for sources with the same options.

    Returns:
        The path of each header in it.

    Raises:
        CompilerMissing: there is no compiler.
        CompilerFailed: it refused the headers, took longer than five minutes, or had no room.
        OSError: there is no folder for its files.
    """
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        file, rule = Path(folder) / "headers.hpp", Path(folder) / "headers.d"
        file.write_text(headers)
        written = ["-MD", "-MF", str(rule), "-o", str(target)]
        _run(*compile_command(options), "-x", "c++-header", str(file), *written)
        # A rule of make: "target: source source", long lines continued, spaces escaped.
        _, _, sources = rule.read_text().replace("\\\n", " ").partition(": ")
        return [one for one in shlex.split(sources.replace("$$", "$")) if one != str(file)]


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerFailed(str(error)) from error
    if done.returncode:
        raise CompilerFailed(_first_error(done.stderr) or f"it ended with {done.returncode}")


@functools.cache
def most_threads() -> int:
    """The most threads for kernels: torch's, if these are OpenMP's.

    GCC's OpenMP functions must be visible in the process, as torch's library makes them; clang
    calls others. Else 1.
    """
    try:
        is_clang = find_compiler().is_clang
        _ = ctypes.CDLL(None).GOMP_parallel
    except (CompilerMissing, AttributeError):
        return 1
    return 1 if is_clang else len(os.sched_getaffinity(0))


def merged(options: Sequence[Options]) -> Options:
    """The union of several sources' options."""

    def every(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one for each in options for one in getattr(each, name)))

    return Options(*(every(field.name) for field in dataclasses.fields(Options)))


def _each(flag: str, values: Iterable[str]) -> list[str]:
    return [f"{flag}{value}" for value in values if value]


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line]
    return (lines or text.splitlines() or [""])[0]

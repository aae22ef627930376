"""Headers of loops that the compiler has parsed already, kept beside the kernels.

Parsing them takes most of the time of a small build. GCC writes what it has parsed into one file
(GCC's manual, "Using Precompiled Headers"), which it maps at the next build. A build that fails
with such a file is repeated without it, so that nothing but time depends on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.compile.cache import CacheRefused, KernelCache
from offload.compile.toolchain import (
    CompilerFailed,
    Options,
    compile_command,
    find_compiler,
    precompile,
)
from offload.console.switches import LOGGER

N_BUILDS_BEFORE = 3
"""Builds of a process without precompiled headers, before it makes them: these would have saved
about the time that making takes, 2.5 s of each against 8.3 s (GCC 12, EPYC of Zen 3). So a process
spends at most about twice the time of the better choice, however many builds follow.
"""

_SUFFIX = ".hpp.gch"  # GCC looks for the name of a header with ".gch" behind it

_lock = threading.Lock()  # held while headers are made, and guards the next three
_n_builds: Counter[tuple[Path, str]] = Counter()  # by folder and key
_refused: set[tuple[Path, str]] = set()  # not made, or not usable
_whole: dict[Path, tuple[int, int]] = {}  # inode and size of files whose digest was verified


@dataclasses.dataclass(frozen=True, slots=True)
class Headers:
    """A file of precompiled headers, and what it was made of.

    Attributes:
        file: its name in the cache's folder: its digest.
        sources: path, size and time of the last change in ns, of each header in it.
    """

    file: str
    sources: tuple[tuple[str, int, int], ...]

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Headers:
        """Read what `to_document` wrote."""
        sources = ((str(path), int(size), int(ns)) for path, size, ns in document["sources"])
        return cls(str(document["file"]), tuple(sources))

    def to_document(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def are_current(self) -> bool:
        """Return whether none of the sources has changed."""
        with contextlib.suppress(OSError):
            return self.sources == tuple(_state(path) for path, _, _ in self.sources)
        return False


def including(headers: str, options: Options, cache: KernelCache) -> Options:
    """Options with which a source's headers need no parsing; the given ones while there are none.

    Args:
        headers: the lines that include what may be precompiled; all have guards.
        options: of the source.
        cache: keeps the precompiled headers, which this makes if it is worth it.

    Raises:
        CompilerMissing: there is no compiler.
    """
    if find_compiler().is_clang:  # it takes other options
        return options
    key = _key(headers, options)
    with _lock:
        found = _found_or_made(key, headers, options, cache)
    if found is None:
        return options
    name = str(found).removesuffix(".gch")
    return dataclasses.replace(options, flags=(*options.flags, "-include", name))


def refuse(headers: str, options: Options, cache: KernelCache) -> None:
    """Do without the precompiled headers in this process: what was built with them failed."""
    _do_without((cache.folder, _key(headers, options)), "a source failed with them alone")


def _do_without(here: tuple[Path, str], reason: str) -> None:
    """Parse headers from now on, which is slower and gives the same kernels."""
    _refused.add(here)
    LOGGER.info("kernels are compiled without precompiled headers: %s", reason)


def _key(headers: str, options: Options) -> str:
    """What precompiled headers depend on, besides the cache's folder and the headers' content."""
    content = json.dumps([headers, compile_command(options), find_compiler().identity])
    return f"headers-{hashlib.sha256(content.encode()).hexdigest()}"


def _found_or_made(key: str, headers: str, options: Options, cache: KernelCache) -> Path | None:
    """The file of precompiled headers; None while there is none."""
    here = cache.folder, key
    if here in _refused:
        return None
    if (found := _found(key, cache)) is not None:
        return found
    _n_builds[here] += 1
    if _n_builds[here] <= N_BUILDS_BEFORE:
        return None
    try:
        return _made(key, headers, options, cache)
    except (OSError, CompilerFailed, CacheRefused) as error:
        _do_without(here, f"they cannot be made: {error}")
        return None


def _found(key: str, cache: KernelCache) -> Path | None:
    found = cache.find_headers(key, Headers.of_document)
    if found is None or not found.are_current():
        return None
    path = cache.folder / found.file
    try:
        status = path.stat()
        is_whole = _whole.get(path) == (status.st_ino, status.st_size)
        if not is_whole and not cache.is_whole(found.file):
            return None
        os.utime(path)
    except OSError:
        return None
    _whole[path] = status.st_ino, status.st_size
    return path


def _made(key: str, headers: str, options: Options, cache: KernelCache) -> Path | None:
    """Precompile headers in the cache's folder.

    Raises:
        CompilerFailed: the compiler refuses, or has no room.
        CacheRefused, OSError: there is no room for the file.
    """
    handle, name = tempfile.mkstemp(dir=cache.folder, suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        sources = precompile(headers, options, partial)
        states = tuple(_state(path) for path in sources)
        file = cache.adopt(partial, _SUFFIX)
        cache.keep_headers(key, Headers(file, states).to_document())
    finally:
        partial.unlink(missing_ok=True)
    return _found(key, cache)


def _state(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns

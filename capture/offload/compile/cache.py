"""Compiled kernels on disk for later processes, which then need neither Inductor nor a compiler."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch

from offload.compile.choice import Choice, choices_of
from offload.compile.toolchain import FLAGS, TEMPLATES, CompilerMissing, find_compiler, most_threads
from offload.console.user_code import level_of_user
from offload.program import Program

T = TypeVar("T")

_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of reading a damaged document."""

FORMAT = 3

LIMIT_BYTES = 2**29
"""The limit for one environment; the least recently used file is removed first."""


class CacheRefused(Exception):
    """The folder is not the user's alone, or cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is kept for a region.

    Attributes:
        symbol: the function's name in the library; empty if the region has no kernel.
        library: the name of its file.
        scratch_bytes: of each range of scratch memory that it takes.
        refusal: why the region has no kernel, for messages.
        is_lasting: another attempt would end the same way. Only such entries are kept.
    """

    symbol: str = ""
    library: str = ""
    scratch_bytes: tuple[int, ...] = ()
    refusal: str = ""
    is_lasting: bool = True


class KernelCache:
    """The kernels of one user on one machine, for one torch and one version of the templates.

    A region's entry is a JSON file that names the shared object of its function. It contains its
    own name and a digest, so that a changed or exchanged entry is not used. Code is loaded only
    from files whose name is their digest, in a folder that only the user may write to.

    Attributes:
        folder: where the files are.
        refusal: why the folder is private to this process; empty if it is the user's.
    """

    refusal = ""

    def __init__(self, folder: Path | None = None) -> None:
        """Open the folder; create it if needed.

        Args:
            folder: for all environments; None: the user's cache folder.

        Raises:
            CacheRefused: it belongs to another user, others may write to it, or it cannot be
                created.
        """
        root = folder or platformdirs.user_cache_path("offload") / "kernels"
        self.folder = root / _environment()
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for one in (root, self.folder):
                one.mkdir(exist_ok=True, mode=0o700)
                status = one.stat()
                if status.st_uid != os.getuid() or status.st_mode & 0o022:
                    raise CacheRefused(
                        f"{one} belongs to another user or may be written by others, who could "
                        "put code there: `chmod go-w` it, or remove it"
                    )
        except OSError as error:
            raise CacheRefused(f"the cache of kernels cannot be made: {error}") from error

    def find(self, key: str) -> Entry | None:
        """The entry of a region; None if there is no usable one.

        An entry made by another compiler is unusable, unless there is no compiler now. A damaged
        entry is removed.
        """
        entry = self._read(key, _entry)
        return entry if entry is None or entry.refusal or self.is_whole(entry.library) else None

    def find_choice(self, key: str) -> Choice | None:
        """The choice made before; None if there is none, or if another compiler had made it."""
        return self._read(key, Choice.of_document)

    def find_document(self, key: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """What `parse` makes of a document that was kept; None as `find`."""
        return self._read(key, parse)

    def keep_document(self, key: str, document: Mapping[str, Any]) -> None:
        """Keep a document of JSON.

        Raises:
            CacheRefused: it cannot be kept.
        """
        self._write(key, document)
        self._make_room()

    def _read(self, key: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        path = self.folder / f"{key}.json"
        if not path.is_file():
            _remove(path)  # anything but a regular file, such as a pipe, would block
            return None
        try:
            document = json.loads(path.read_text())
            if document.pop("digest") != _digest_of(key, document):
                raise ValueError(f"{path} has changed since it was written")
            found, compiler = parse(document), str(document["compiler"])
        except FileNotFoundError:
            return None
        except _DAMAGED:
            _remove(path)
            return None
        if _compiler() not in (compiler, ""):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def library_path(self, entry: Entry) -> Path:
        """The file of an entry's library."""
        return self.folder / entry.library

    def keep_library(self, built: Path) -> str:
        """Keep a shared object, and return its name.

        Raises:
            CacheRefused: it cannot be kept.
        """
        name = f"{_digest(built)}.so"
        try:
            self._put(name, built.read_bytes())
        except OSError as error:
            raise CacheRefused(f"the cache of kernels has no room: {error}") from error
        self._make_room()
        return name

    def keep(self, entries: Mapping[str, Entry]) -> None:
        """Keep entries by region.

        Raises:
            CacheRefused: they cannot be kept.
        """
        for key, entry in entries.items():
            document = dataclasses.asdict(entry)
            del document["is_lasting"]
            self._write(key, document)

    def keep_choice(self, key: str, choice: Choice) -> None:
        """Keep a choice.

        Raises:
            CacheRefused: it cannot be kept.
        """
        self._write(key, choice.to_document())

    def find_headers(self, key: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """What is known of precompiled headers; None if nothing, or by another compiler."""
        return self._read(key, parse)

    def keep_headers(self, key: str, document: Mapping[str, Any]) -> None:
        """Keep what is known of precompiled headers.

        Raises:
            CacheRefused: it cannot be kept.
        """
        self._write(key, document)

    def adopt(self, partial: Path, suffix: str) -> str:
        """Give a file in this folder its digest as name, and return that.

        Raises:
            OSError: it cannot be renamed.
        """
        name = f"{_digest(partial)}{suffix}"
        partial.chmod(0o600)
        os.replace(partial, self.folder / name)
        self._make_room()
        return name

    def forget_choices(self, program: Program) -> None:
        """Remove the choices for a program, so that it is timed again."""
        for path in self.folder.glob(f"{choices_of(program)}*.json"):
            _remove(path)

    def _write(self, key: str, document: Mapping[str, Any]) -> None:
        complete = {**document, "compiler": _compiler()}
        content = json.dumps({**complete, "digest": _digest_of(key, complete)})
        try:
            self._put(f"{key}.json", content.encode())
        except OSError as error:
            raise CacheRefused(f"the cache of kernels has no room: {error}") from error

    def _put(self, name: str, content: bytes) -> None:
        """Write a file atomically, also beside other writers."""
        handle, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            target = self.folder / name
            if target.is_dir():
                _remove(target)
            os.replace(partial, target)
        except OSError:
            _remove(Path(partial))
            raise

    def is_whole(self, file: str) -> bool:
        """Return whether a file's content has the digest in its name; else remove it."""
        path = self.folder / file
        try:
            is_whole = _digest(path) == file.partition(".")[0]
        except OSError:
            return False
        with contextlib.suppress(OSError):
            if is_whole:
                os.utime(path)
            else:
                _remove(path)
        return is_whole

    def _make_room(self) -> None:
        """Remove the least recently used files beyond the limit. Loaded code is unaffected."""
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= LIMIT_BYTES:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def open_cache(folder: Path | None = None) -> KernelCache:
    """Open the folder; if it is unusable, one of this process alone, with a warning.

    Raises:
        CacheRefused: there is no folder for that either.
    """
    try:
        if folder not in _without_room:
            return KernelCache(folder)
        refusal = _without_room[folder]
    except CacheRefused as error:
        refusal = str(error)
    return _own_cache(folder, refusal)


def replace_cache(folder: Path | None, refusal: str) -> KernelCache:
    """From now on, use a folder of this process instead of one that has no room.

    Raises:
        CacheRefused: there is no folder for that either.
    """
    _without_room[folder] = refusal
    return _own_cache(folder, refusal)


_without_room: dict[Path | None, str] = {}  # folders that could not keep files, and why


def _own_cache(folder: Path | None, refusal: str) -> KernelCache:
    cache = KernelCache(_own_folder(folder))
    cache.refusal = refusal
    warnings.warn(
        f"{refusal}; kernels are kept for this process alone, and made again by the next one. "
        "XDG_CACHE_HOME names another place for caches",
        RuntimeWarning,
        stacklevel=level_of_user(),
    )
    return cache


@functools.cache
def _own_folder(_: Path | None) -> Path:
    """A folder that replaces another, and is removed when the process ends."""
    try:
        folder = tempfile.mkdtemp(prefix="offload-kernels-")
    except OSError as error:
        raise CacheRefused(f"there is no folder for kernels either: {error}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "kernels"


def _remove(path: Path) -> None:
    """Remove a file or folder of any kind."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _digest_of(key: str, document: Mapping[str, Any]) -> str:
    """The digest of an entry with its name, without the digest itself."""
    content = json.dumps([key, document], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _entry(document: Mapping[str, Any]) -> Entry:
    return Entry(
        str(document["symbol"]),
        str(document["library"]),
        tuple(int(one) for one in document["scratch_bytes"]),
        str(document["refusal"]),
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compiler() -> str:
    """The identity of this machine's compiler; empty if there is none."""
    try:
        return find_compiler().identity
    except CompilerMissing:
        return ""


def _environment() -> str:
    """What compiled code depends on besides its source and the compiler, as a folder's name."""
    content = json.dumps(
        [
            FORMAT,
            FLAGS,
            most_threads(),
            torch.__version__,
            torch.version.git_version,
            platform.machine(),
            _processor(),
            sorted((path.name, _digest(path)) for path in _sources()),
        ]
    )
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _sources() -> list[Path]:
    """What makes kernels: the templates, and the code of this package."""
    return [*TEMPLATES.glob("*.hpp"), *Path(__file__).parent.glob("*.py")]


def _processor() -> str:
    """The processor's name and instruction sets, which `-march=native` compiles for."""
    wanted = ("model name", "flags", "Features", "CPU part")
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        found: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
            if not name.strip() and found:
                break
        return json.dumps(found, sort_keys=True)
    return platform.processor()

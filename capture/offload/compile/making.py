"""Makes kernels: those not in the cache are lowered, compiled and kept."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

from offload.compile import precompiled, templates
from offload.compile.cache import CacheRefused, Entry, KernelCache, open_cache, replace_cache
from offload.compile.packing import Packing
from offload.compile.proof import KernelProof
from offload.compile.refusal import PassingRefusal, UnsupportedRegion
from offload.compile.regions import Kind, Region
from offload.compile.toolchain import (
    CompilerFailed,
    CompilerMissing,
    Options,
    build,
    find_compiler,
    merged,
)
from offload.compile.uninterrupted import uninterrupted
from offload.console.progress import stage
from offload.program import KernelFunction, Program


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """One function in C++."""

    symbol: str
    prelude: str
    text: str
    options: Options
    scratch_bytes: tuple[int, ...]
    slow_headers: str = ""  # those of `prelude` that take long to parse


class Kernels:
    """Functions of regions: found in the cache, or made and kept there.

    Attributes:
        entries: of each requested region, by key.
    """

    def __init__(self, cache_folder: Path | None = None) -> None:
        """Open the cache, or one of this process; without either, all regions are refused."""
        self.entries: dict[str, Entry] = {}
        self._addresses: dict[tuple[str, str], int] = {}
        self._refusal = ""
        self._folder = cache_folder
        try:
            self._cache: KernelCache | None = open_cache(cache_folder)
        except CacheRefused as error:
            self._cache, self._refusal = None, str(error)

    def make(self, wanted: Mapping[str, Region | Packing]) -> None:
        """Make an entry for each region.

        Those never requested before, in this process or another, are lowered and compiled. Without
        a compiler they have no function.
        """
        missing = {}
        for key, one in wanted.items():
            if key not in self.entries:
                found = None if self._cache is None else self._cache.find(key)
                if found is None:
                    missing[key] = one
                else:
                    self._add(key, found)
        for key, entry in self._made(missing).items() if missing else ():
            self._add(key, entry)

    @property
    def cache_refusal(self) -> str:
        """Why kernels are kept only for this process; empty if also for others."""
        return "" if self._cache is None else self._cache.refusal

    def function(
        self, key: str, name: str, replaces: Program, *, n_derived: int = 0, sums: int = -1
    ) -> tuple[KernelFunction, KernelProof]:
        """A region's function, which must exist, and its proof; arguments as of KernelProof."""
        entry = self.entries[key]
        address = self._addresses[entry.library, entry.symbol]
        proof = KernelProof(
            name, address, replaces, entry.scratch_bytes, n_derived=n_derived, sums=sums
        )
        return KernelFunction(address, proof.prove), proof

    def _made(self, missing: Mapping[str, Region | Packing]) -> dict[str, Entry]:
        if self._cache is None:
            return dict.fromkeys(missing, Entry(refusal=self._refusal, is_lasting=False))
        try:
            find_compiler()
            try:
                return _made(missing, self._cache)
            except CacheRefused as error:
                self._cache = replace_cache(self._folder, str(error))
                return _made(missing, self._cache)
        except (CompilerMissing, CacheRefused) as error:
            return dict.fromkeys(missing, Entry(refusal=str(error), is_lasting=False))

    def _add(self, key: str, entry: Entry) -> None:
        """Keep an entry whose function can be loaded, or why it cannot."""
        self.entries[key] = entry
        if not entry.symbol:
            return
        assert self._cache is not None  # it holds the library
        try:
            function = getattr(ctypes.CDLL(str(self._cache.library_path(entry))), entry.symbol)
        except (OSError, AttributeError) as error:
            refusal = f"its compiled code cannot be loaded: {error}"
            self.entries[key] = Entry(refusal=refusal, is_lasting=False)
            return
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None  # a function that was found has an address
        self._addresses[entry.library, entry.symbol] = address


def _made(missing: Mapping[str, Region | Packing], cache: KernelCache) -> dict[str, Entry]:
    """Compile regions into one library; if the compiler refuses that, each by itself.

    Refusals by the compiler, or by Inductor for a reason that may pass, are not kept: the disk may
    have been full.

    Raises:
        CacheRefused: the result cannot be kept.
    """
    entries: dict[str, Entry] = {}
    sources: dict[str, _Source] = {}
    failed: dict[str, Entry] = {}
    with stage("making kernels", len(missing) + 1) as current:
        for number, (key, region) in enumerate(missing.items(), 1):
            try:
                sources[key] = _source(_symbol(key), region)
            except PassingRefusal as error:
                failed[key] = Entry(refusal=str(error), is_lasting=False)
            except UnsupportedRegion as error:
                entries[key] = Entry(refusal=str(error))
            current.reach(number)
        try:
            entries |= _compiled(sources, cache)
        except CompilerFailed:
            for key, source in sources.items():
                try:
                    entries |= _compiled({key: source}, cache)
                except CompilerFailed as error:
                    failed[key] = Entry(
                        refusal=f"{find_compiler().command[0]} refuses it: {error}",
                        is_lasting=False,
                    )
        cache.keep(entries)
        current.reach(len(missing) + 1)
    return entries | failed


def _symbol(key: str) -> str:
    """The name of a function."""
    return key.replace("-", "_")


def _source(symbol: str, region: Region | Packing) -> _Source:
    """The source of a region's function, or of one that packs a matrix.

    Raises:
        UnsupportedRegion: there is none.
    """
    if isinstance(region, Packing):
        text = templates.packing_function(symbol, region.matrix)
        return _Source(symbol, templates.PRELUDE, text, Options(), ())
    if region.kind is Kind.LOOPS:
        return uninterrupted(functools.partial(_loops, symbol, region.extracted.program))
    is_packed = region.packing is not None
    text = templates.function(symbol, region.extracted.program, packed=is_packed)
    scratch_bytes = templates.scratch_bytes(region.extracted.program)
    return _Source(symbol, templates.PRELUDE, text, Options(), scratch_bytes)


def _loops(symbol: str, program: Program) -> _Source:
    from offload.compile import inductor  # noqa: PLC0415 - takes seconds

    loops = inductor.lower(program)
    options = inductor.build_options()
    text = loops.source(symbol)
    return _Source(symbol, inductor.PRELUDE, text, options, loops.scratch_bytes, inductor.HEADERS)


def _compiled(sources: Mapping[str, _Source], cache: KernelCache) -> dict[str, Entry]:
    """Compile sources into one library, and keep it.

    Raises:
        CompilerFailed: the compiler refuses a source, or there is no room for its files.
        CacheRefused: the library cannot be kept.
    """
    if not sources:
        return {}
    preludes = dict.fromkeys(source.prelude for source in sources.values())
    text = "\n".join([*preludes, *(source.text for source in sources.values())])
    try:
        with tempfile.TemporaryDirectory(prefix="offload-") as folder:
            target = Path(folder) / "kernels.so"
            options = merged([source.options for source in sources.values()])
            headers = "".join(dict.fromkeys(one.slow_headers for one in sources.values()))
            _build(text, headers, options, target, cache)
            library = cache.keep_library(target)
    except OSError as error:
        raise CompilerFailed(f"there is no folder for its files: {error}") from error
    return {
        key: Entry(source.symbol, library, source.scratch_bytes) for key, source in sources.items()
    }


def _build(text: str, headers: str, options: Options, target: Path, cache: KernelCache) -> None:
    """Compile a source, with precompiled headers if it has slow ones.

    Raises:
        CompilerFailed: the compiler refuses the source without precompiled headers.
    """
    if not headers:
        build(text, options, target)
        return
    headers += templates.PRELUDE  # always, so that one file serves all
    quick = precompiled.including(headers, options, cache)
    try:
        build(text, quick, target)
    except CompilerFailed:
        if quick is options:
            raise
        build(text, options, target)
        precompiled.refuse(headers, options, cache)  # the source is right, so they are not

"""The rewrite: regions of a Program become launches of compiled kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from offload.compile import templates
from offload.compile.cache import CacheRefused, Entry, KernelCache
from offload.compile.proof import KernelProof
from offload.compile.refusal import UnsupportedRegion
from offload.compile.regions import Kind, Region, find_regions
from offload.compile.toolchain import (
    CompilerFailed,
    CompilerMissing,
    Options,
    build,
    find_compiler,
    merged,
)
from offload.program import (
    BoundProgram,
    Kernel,
    KernelFunction,
    Launch,
    Program,
    Role,
    TensorView,
    Value,
    rewrite,
)
from offload.progress import stage


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """What became kernels, and what did not.

    Attributes:
        n_kernels: launches of compiled code.
        n_replaced: launches that these stand for.
        kept: how many other launches stay as recorded, by operator and reason.
        proofs: of each kernel launch, in order.
    """

    n_kernels: int
    n_replaced: int
    kept: Mapping[tuple[str, str], int]
    proofs: tuple[KernelProof, ...]

    def explain(self) -> list[str]:
        """What became of the launches, in lines for people."""
        lines = [
            f"fused: {self.n_kernels} kernels in the place of {self.n_replaced} recorded launches"
        ]
        lines += [
            f"  {count} x {operator} as recorded: {reason}"
            for (operator, reason), count in sorted(self.kept.items())
        ]
        failures = Counter((one.name, one.failure) for one in self.proofs if one.failure)
        lines += [
            f"  {count} x {name} failed its proof: {failure}"
            for (name, failure), count in sorted(failures.items())
        ]
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """A Program some of whose launches are compiled kernels, and what became of all of them."""

    bound: BoundProgram
    fusion: Fusion


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """One function in C++."""

    symbol: str
    prelude: str
    text: str
    options: Options
    scratch_bytes: tuple[int, ...]


def fuse(
    bound: BoundProgram,
    kept_operators: Mapping[str, str] = MappingProxyType({}),
    cache_folder: Path | None = None,
) -> Fused:
    """Make kernels of what can be compiled; the rest stays as recorded.

    What is known from an earlier call, in this process or another, is taken from the cache. Where
    there is no compiler, what is not there stays as recorded.

    Args:
        bound: what to fuse; unchanged.
        kept_operators: operators that stay as recorded, with the reason for people.
        cache_folder: where kernels are kept; None: in the user's folder for caches.
    """
    program = bound.program
    regions = find_regions(program, kept_operators)
    distinct = {region.key: region for region in regions.found}
    entries, addresses = _loaded(*_entries(distinct, cache_folder))
    rewriter = _Rewriter(program, addresses)
    kept = Counter((program.launches[at].name, why) for at, why in regions.kept.items())
    beginning = {region.first: region for region in regions.found}
    at = 0
    while at < len(program.launches):
        region = beginning.get(at)
        if region is None:
            rewriter.launches.append(program.launches[at])
            at += 1
            continue
        if entries[region.key].symbol:
            rewriter.add_kernel(region, entries[region.key])
        else:
            recorded = program.launches[region.first : region.end]
            rewriter.launches += recorded
            kept += Counter((one.name, entries[region.key].refusal) for one in recorded)
        at = region.end
    return rewriter.fused(bound, kept)


def _entries(
    distinct: Mapping[str, Region], cache_folder: Path | None
) -> tuple[dict[str, Entry], Path]:
    """The entry of each region, compiled where it is not in the cache; and where libraries lie."""
    try:
        cache = KernelCache(cache_folder)
    except CacheRefused as error:
        return {key: Entry(refusal=str(error)) for key in distinct}, Path()
    entries = {key: found for key in distinct if (found := cache.find(key)) is not None}
    missing = {key: one for key, one in distinct.items() if key not in entries}
    if not missing:
        return entries, cache.folder
    try:
        find_compiler()
    except CompilerMissing as error:
        refused = {key: Entry(refusal=str(error)) for key in missing}
        return entries | refused, cache.folder
    try:
        made = _made(missing, cache)
    except CacheRefused as error:
        made = {key: Entry(refusal=str(error)) for key in missing}
    return entries | made, cache.folder


def _loaded(
    entries: Mapping[str, Entry], folder: Path
) -> tuple[dict[str, Entry], dict[tuple[str, str], int]]:
    """The entries whose functions could be loaded, the others refused; and where functions are."""
    addresses: dict[tuple[str, str], int] = {}
    found = dict(entries)
    for key, entry in entries.items():
        if not entry.symbol:
            continue
        try:
            function = getattr(ctypes.CDLL(str(folder / entry.library)), entry.symbol)
        except (OSError, AttributeError) as error:
            found[key] = Entry(refusal=f"its compiled code cannot be loaded: {error}")
            continue
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None  # a function that was found is somewhere
        addresses[entry.library, entry.symbol] = address
    return found, addresses


def _made(missing: Mapping[str, Region], cache: KernelCache) -> dict[str, Entry]:
    """Compile regions into one library, and those that the compiler refuses there by themselves.

    What the compiler refuses is tried again another time: it may be that the disk was full.

    Raises:
        CacheRefused: what was made cannot be kept.
    """
    entries: dict[str, Entry] = {}
    sources: dict[str, _Source] = {}
    failed: dict[str, Entry] = {}
    with stage("making kernels", len(missing) + 1) as told:
        for number, (key, region) in enumerate(missing.items(), 1):
            try:
                sources[key] = _source(f"kernel_{region.extracted.key[:24]}", region)
            except UnsupportedRegion as error:
                entries[key] = Entry(refusal=str(error))
            told.reach(number)
        try:
            entries |= _compiled(sources, cache)
        except CompilerFailed:
            for key, source in sources.items():
                try:
                    entries |= _compiled({key: source}, cache)
                except CompilerFailed as error:
                    failed[key] = Entry(refusal=f"the compiler refuses it: {error}")
        cache.keep(entries)
        told.reach(len(missing) + 1)
    return entries | failed


def _source(symbol: str, region: Region) -> _Source:
    """The function of a region.

    Raises:
        UnsupportedRegion: none can be made.
    """
    if region.kind is Kind.LOOPS:
        from offload.compile import inductor  # noqa: PLC0415 - takes seconds

        loops = inductor.lower(region.extracted.program)
        return _Source(
            symbol,
            inductor.PRELUDE,
            loops.source(symbol),
            inductor.build_options(),
            loops.scratch_bytes,
        )
    text = templates.function(symbol, region.extracted.program)
    return _Source(symbol, templates.PRELUDE, text, Options(), ())


def _compiled(sources: Mapping[str, _Source], cache: KernelCache) -> dict[str, Entry]:
    if not sources:
        return {}
    preludes = dict.fromkeys(source.prelude for source in sources.values())
    text = "\n".join([*preludes, *(source.text for source in sources.values())])
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        target = Path(folder) / "kernels.so"
        build(text, merged([source.options for source in sources.values()]), target)
        library = cache.keep_library(target)
    return {
        key: Entry(source.symbol, library, source.scratch_bytes) for key, source in sources.items()
    }


def _shared_ranges(launches: Sequence[Launch]) -> tuple[str, ...]:
    """The outer profiler ranges that all launches are in."""
    levels = zip(*(launch.ranges for launch in launches), strict=False)
    return tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


class _Rewriter:
    """Gathers the launches of the fused Program."""

    def __init__(self, program: Program, addresses: Mapping[tuple[str, str], int]) -> None:
        self._program = program
        self._addresses = addresses
        self._proofs: list[KernelProof] = []
        self._functions: list[KernelFunction] = []
        self._n_replaced = 0
        self.launches: list[Launch] = []
        self.values: list[Value] = list(program.values)

    def add_kernel(self, region: Region, entry: Entry) -> None:
        extracted = region.extracted
        replaced = self._program.launches[region.first : region.end]
        scratch = [self._scratch(size_bytes) for size_bytes in entry.scratch_bytes]
        made = (*extracted.made, *scratch)
        address = self._addresses[entry.library, entry.symbol]
        callee = Kernel(len(self._functions), extracted.program)
        proof = KernelProof(callee.name, address, extracted.program, entry.scratch_bytes)
        self.launches.append(
            Launch(
                index=len(self.launches),
                callee=callee,
                arguments=extracted.inputs,
                results=made,
                reads=tuple(view.value for view in extracted.inputs),
                writes=tuple(view.value for view in made),
                random=False,
                guard=None,
                guards_shape=False,
                source=replaced[0].source,
                ranges=_shared_ranges(replaced),
            )
        )
        self._proofs.append(proof)
        self._functions.append(KernelFunction(address, proof.prove, proof.run_replaced))
        self._n_replaced += len(replaced)

    def fused(self, bound: BoundProgram, kept: Mapping[tuple[str, str], int]) -> Fused:
        rewritten = rewrite(self._program, self.launches, self.values)
        bindings = dataclasses.replace(
            bound.bindings.moved(rewritten.positions), kernels=tuple(self._functions)
        )
        fusion = Fusion(len(self._functions), self._n_replaced, dict(kept), tuple(self._proofs))
        return Fused(BoundProgram(rewritten.program, bindings), fusion)

    def _scratch(self, size_bytes: int) -> TensorView:
        index = len(self.values)
        self.values.append(
            Value(index, Role.SCRATCH, (size_bytes,), (1,), "uint8", size_bytes, "a kernel's own")
        )
        return TensorView(index, 0, (size_bytes,), (1,), "uint8")

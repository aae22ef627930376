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

from offload.byte_sizes import show_bytes
from offload.compile import templates
from offload.compile.cache import CacheRefused, Entry, KernelCache
from offload.compile.extraction import whole_view
from offload.compile.packing import Packing, packable_weights
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
        packed_bytes: of each weight that kernels read as panels, those of its panels.
        kept: how many other launches stay as recorded, by operator and reason.
        proofs: of each kernel launch, in order.
    """

    n_kernels: int
    n_replaced: int
    packed_bytes: tuple[int, ...]
    kept: Mapping[tuple[str, str], int]
    proofs: tuple[KernelProof, ...]

    def explain(self) -> list[str]:
        """What became of the launches, in lines for people."""
        lines = [
            f"fused: {self.n_kernels} kernels in the place of {self.n_replaced} recorded launches"
        ]
        if self.packed_bytes:
            lines.append(
                f"  {len(self.packed_bytes)} packed weights, {show_bytes(sum(self.packed_bytes))} "
                "beside the model's own, made again where these are written"
            )
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
    *,
    packs: bool = True,
) -> Fused:
    """Make kernels of what can be compiled; the rest stays as recorded.

    What is known from an earlier call, in this process or another, is taken from the cache. Where
    there is no compiler, what is not there stays as recorded.

    Args:
        bound: what to fuse; unchanged.
        kept_operators: operators that stay as recorded, with the reason for people.
        cache_folder: where kernels are kept; None: in the user's folder for caches.
        packs: weights may be packed where that pays, in memory beside them.
    """
    program = bound.program
    packable = packable_weights(bound) if packs else frozenset()
    regions = find_regions(program, kept_operators, packable)
    distinct: dict[str, Region | Packing] = {region.key: region for region in regions.found}
    distinct |= {one.key: one for region in regions.found if (one := region.packing) is not None}
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
        needed = [region.key, *([] if region.packing is None else [region.packing.key])]
        refusal = next((entries[key].refusal for key in needed if not entries[key].symbol), None)
        if refusal is None:
            rewriter.add_region(region, entries)
        else:
            recorded = program.launches[region.first : region.end]
            rewriter.launches += recorded
            kept += Counter((one.name, refusal) for one in recorded)
        at = region.end
    return rewriter.fused(bound, kept)


def _entries(
    distinct: Mapping[str, Region | Packing], cache_folder: Path | None
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


def _made(missing: Mapping[str, Region | Packing], cache: KernelCache) -> dict[str, Entry]:
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
                sources[key] = _source(_symbol(key), region)
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


def _symbol(key: str) -> str:
    """The name of a function."""
    return key.replace("-", "_")


def _source(symbol: str, region: Region | Packing) -> _Source:
    """The function of a region, or what packs a matrix.

    Raises:
        UnsupportedRegion: none can be made.
    """
    if isinstance(region, Packing):
        text = templates.packing_function(symbol, region.matrix)
        return _Source(symbol, templates.PRELUDE, text, Options(), ())
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
    is_packed = region.packing is not None
    text = templates.function(symbol, region.extracted.program, packed=is_packed)
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
        self._packed: dict[tuple[int, str], TensorView] = {}
        self.launches: list[Launch] = []
        self.values: list[Value] = list(program.values)

    def add_region(self, region: Region, entries: Mapping[str, Entry]) -> None:
        """A kernel in the place of the region's launches, what packs its matrix before it."""
        extracted, entry = region.extracted, entries[region.key]
        replaced = self._program.launches[region.first : region.end]
        packed = []
        if (packing := region.packing) is not None:
            packed.append(self._panels(region.weight, packing, entries[packing.key], replaced))
        scratch = [self._scratch(size_bytes) for size_bytes in entry.scratch_bytes]
        self._add_kernel(
            entry,
            extracted.program,
            (*extracted.inputs, *packed),
            made=(*extracted.made, *scratch),
            replaced=replaced,
        )
        self._n_replaced += len(replaced)

    def _panels(
        self, weight: int, packing: Packing, entry: Entry, users: Sequence[Launch]
    ) -> TensorView:
        """The packed matrix of a weight, made once for all that read it."""
        if (weight, packing.key) not in self._packed:
            made = packing.program.results[0].view
            value = dataclasses.replace(
                packing.program.values[made.value],
                index=len(self.values),
                role=Role.DERIVED,
                name=f"{self._program.values[weight].name}, packed",
            )
            self.values.append(value)
            view = whole_view(value)
            given = whole_view(self._program.values[weight])
            self._add_kernel(
                entry, packing.program, (given,), made=(view,), replaced=users, derives=True
            )
            self._packed[weight, packing.key] = view
        return self._packed[weight, packing.key]

    def _add_kernel(
        self,
        entry: Entry,
        replaces: Program,
        given: tuple[TensorView, ...],
        *,
        made: tuple[TensorView, ...],
        replaced: Sequence[Launch],
        derives: bool = False,
    ) -> None:
        """A launch of a compiled function, in the place in people's code of those it replaces."""
        address = self._addresses[entry.library, entry.symbol]
        callee = Kernel(len(self._functions), replaces, derives)
        n_derived = len(given) - len(replaces.inputs)
        proof = KernelProof(callee.name, address, replaces, entry.scratch_bytes, n_derived)
        self.launches.append(
            Launch(
                index=len(self.launches),
                callee=callee,
                arguments=given,
                results=made,
                reads=tuple(view.value for view in given),
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

    def fused(self, bound: BoundProgram, kept: Mapping[tuple[str, str], int]) -> Fused:
        rewritten = rewrite(self._program, self.launches, self.values)
        bindings = dataclasses.replace(
            bound.bindings.moved(rewritten.positions), kernels=tuple(self._functions)
        )
        fusion = Fusion(
            len(self._functions) - len(self._packed),
            self._n_replaced,
            tuple(self.values[view.value].size_bytes for view in self._packed.values()),
            dict(kept),
            tuple(self._proofs),
        )
        return Fused(BoundProgram(rewritten.program, bindings), fusion)

    def _scratch(self, size_bytes: int) -> TensorView:
        index = len(self.values)
        self.values.append(
            Value(index, Role.SCRATCH, (size_bytes,), (1,), "uint8", size_bytes, "a kernel's own")
        )
        return TensorView(index, 0, (size_bytes,), (1,), "uint8")

"""The rewrite: regions of a Program become launches of compiled kernels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import torch

from offload.compile.choice import Choice
from offload.compile.device_making import DeviceKernels
from offload.compile.device_proof import DeviceProof
from offload.compile.endings import sums_of
from offload.compile.extraction import Extracted, whole_view
from offload.compile.making import Kernels
from offload.compile.packing import Packing, packable_weights
from offload.compile.proof import KernelProof
from offload.compile.regions import Kind, Region, Regions, divide, find_regions
from offload.console.amounts import show_bytes, show_count
from offload.program import (
    BoundProgram,
    DeviceFunction,
    Kernel,
    KernelFunction,
    Launch,
    Program,
    Role,
    TensorView,
    Value,
    rewrite,
)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRegion:
    """A kernel and the launches that it replaces.

    Attributes:
        key: equal for regions with the same kernel.
        first, end: the first recorded launch, and behind the last one.
        kernel: its index in `Bindings.kernels`.
    """

    key: str
    first: int
    end: int
    kernel: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """What became kernels, and what did not.

    Attributes:
        regions: those with a kernel, in order, even if its proof failed.
        packed_bytes: the bytes of the panels of each packed weight.
        kept: how many other launches stay as recorded, by operator and reason.
        proofs: of each kernel in `Bindings.kernels`.
        choice: the choice by measured times, if requested; else None.
        cache_refusal: why kernels are kept only for this process; else empty.
    """

    regions: tuple[FusedRegion, ...]
    packed_bytes: tuple[int, ...]
    kept: Mapping[tuple[str, str], int]
    proofs: tuple[KernelProof | DeviceProof, ...]
    choice: Choice | None = None
    cache_refusal: str = ""

    @property
    def n_kernels(self) -> int:
        """The number of compiled launches that have not failed, without those that pack weights."""
        return len(self._used)

    @property
    def n_replaced(self) -> int:
        """The number of recorded launches that these replace."""
        return sum(region.end - region.first for region in self._used)

    @property
    def _used(self) -> list[FusedRegion]:
        return [region for region in self.regions if not self.proofs[region.kernel].failure]

    def __str__(self) -> str:
        """The lines of `explain` as one text."""
        return "\n".join(self.explain())

    def explain(self) -> list[str]:
        """What became of the launches, in lines for messages."""
        launches = show_count(self.n_replaced, "recorded launch", "recorded launches")
        replaced = f"{show_count(self.n_kernels, 'kernel')} in place of {launches}"
        lines = [f"fused: {replaced if self._used else 'nothing'}"]
        lines += [] if self.choice is None else [f"  {self.choice.explain()}"]
        if self.packed_bytes:
            use = (
                "packed again when the model's weights are written"
                if self._used
                else "which nothing reads"
            )
            lines.append(
                f"  {show_count(len(self.packed_bytes), 'packed weight')}, "
                f"{show_bytes(sum(self.packed_bytes))}, {use}"
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
        if self.cache_refusal:
            lines.append(f"  kernels are kept for this process alone: {self.cache_refusal}")
        if failures:
            lines.append(
                "  launches whose kernel failed run as recorded from now on; if the first "
                "execution's inputs were unusual (infinities, for example), load again and begin "
                "with other inputs"
            )
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """A Program with compiled kernels among its launches, and a report on all of them."""

    bound: BoundProgram
    fusion: Fusion


def fuse(
    bound: BoundProgram,
    kept_operators: Mapping[str, str] = MappingProxyType({}),
    cache_folder: Path | None = None,
    *,
    packs: bool = True,
    choice: Choice | None = None,
    device: torch.device | None = None,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Fused:
    """Replace launches that can be compiled by kernels; the rest stays as recorded.

    Kernels of earlier loads, in this process or another, are taken from the cache. Without a
    compiler, launches that are not cached stay as recorded.

    Args:
        bound: what to fuse; unchanged.
        kept_operators: operators that stay as recorded, with the reason for messages.
        cache_folder: where kernels are kept; None: in the user's cache folder.
        packs: weights may be packed where that pays, in additional memory.
        choice: which regions stay as recorded; None: all that can be become kernels.
        device: a GPU to make kernels for, of loops alone; None: the CPU.
        failed: by key, how the proof of a region failed, which therefore stays as recorded.
    """
    program = bound.program
    kernels: Kernels | DeviceKernels
    if device is None:
        packable = packable_weights(bound) if packs else frozenset()
        regions = find_regions(program, kept_operators, packable)
        kernels = Kernels(cache_folder)
    else:
        regions = find_regions(program, kept_operators, has_templates=False)
        kernels = DeviceKernels(device, cache_folder)
    regions = _made(program, regions, kernels)
    rewriter = _Rewriter(program, kernels)
    kept = Counter((program.launches[at].name, why) for at, why in regions.kept.items())
    beginning = {region.first: region for region in regions.found}
    at = 0
    while at < len(program.launches):
        region = beginning.get(at)
        if region is None:
            rewriter.launches.append(program.launches[at])
            at += 1
            continue
        refusals = [kernels.entries[key].refusal for key in _needed(region)]
        refusals += [] if choice is None else [choice.refusal, choice.kept.get(region.key, "")]
        if region.key in failed:
            refusals.append(f"its kernel failed its proof: {failed[region.key]}")
        refusal = next(filter(None, refusals), "")
        if refusal:
            recorded = program.launches[region.first : region.end]
            rewriter.launches += recorded
            kept += Counter((one.name, refusal) for one in recorded)
        else:
            rewriter.add_region(region)
        at = region.end
    return rewriter.fused(bound, kept, choice)


def _needed(region: Region) -> dict[str, Region | Packing]:
    """The functions that a region needs, by key."""
    needed: dict[str, Region | Packing] = {region.key: region}
    if region.packing is not None:
        needed[region.packing.key] = region.packing
    return needed


def _made(program: Program, regions: Regions, kernels: Kernels | DeviceKernels) -> Regions:
    """Make kernels of regions. A refused region of loops is halved, recursively."""
    found, kept = list(regions.found), dict(regions.kept)
    while True:
        kernels.make({key: one for region in found for key, one in _needed(region).items()})
        divided = [region for region in found if _is_divided(region, kernels)]
        if not divided:
            return Regions(tuple(found), kept)
        for region in divided:
            halves = divide(program, region, has_templates=isinstance(kernels, Kernels))
            at = found.index(region)
            found[at : at + 1] = halves.found
            kept |= halves.kept


def _is_divided(region: Region, kernels: Kernels | DeviceKernels) -> bool:
    """Whether parts of a refused region may still become kernels."""
    entry = kernels.entries[region.key]
    is_refused = bool(entry.refusal) and entry.is_lasting
    return is_refused and region.kind is Kind.LOOPS and region.end - region.first > 1


def _shared_ranges(launches: Sequence[Launch]) -> tuple[str, ...]:
    """The outer profiler ranges that all launches share."""
    levels = zip(*(launch.ranges for launch in launches), strict=False)
    return tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _unread(extracted: Extracted, weight: int) -> tuple[int, ...]:
    """A packed weight's position among the inputs, unless more than its matrix is used."""
    position = next(at for at, view in enumerate(extracted.inputs) if view.value == weight)
    inside = extracted.program.inputs[position].value
    uses = [
        view
        for launch in extracted.program.launches
        for view in launch.views()
        if view.value == inside
    ]
    return (position,) if len(uses) == 1 else ()


class _Rewriter:
    """Gathers the launches of the fused Program."""

    def __init__(self, program: Program, kernels: Kernels | DeviceKernels) -> None:
        self._program = program
        self._kernels = kernels
        self._proofs: list[KernelProof | DeviceProof] = []
        self._functions: list[KernelFunction | DeviceFunction] = []
        self._regions: list[FusedRegion] = []
        self._packed: dict[tuple[int, str], TensorView] = {}
        self.launches: list[Launch] = []
        self.values: list[Value] = list(program.values)

    def add_region(self, region: Region) -> None:
        """Add a kernel for the region's launches, with the packing of its matrix before it."""
        extracted = region.extracted
        replaced = self._program.launches[region.first : region.end]
        panels: list[TensorView] = []
        packed: tuple[int, ...] = ()
        if (packing := region.packing) is not None:
            panels.append(self._panels(region.weight, packing, replaced))
            packed = _unread(extracted, region.weight)
        scratch_bytes = self._kernels.entries[region.key].scratch_bytes
        scratch = [self._scratch(size_bytes) for size_bytes in scratch_bytes]
        self._add_kernel(
            region.key,
            extracted.program,
            (*extracted.inputs, *panels),
            made=(*extracted.made, *scratch),
            replaced=replaced,
            packed=packed,
            sums=sums_of(extracted.program) if region.kind is Kind.TEMPLATE else -1,
        )
        kernel = len(self._functions) - 1
        self._regions.append(FusedRegion(region.key, region.first, region.end, kernel))

    def _panels(self, weight: int, packing: Packing, users: Sequence[Launch]) -> TensorView:
        """The packed matrix of a weight, made once for all readers."""
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
                packing.key,
                packing.program,
                (given,),
                made=(view,),
                replaced=users,
                derives=True,
            )
            self._packed[weight, packing.key] = view
        return self._packed[weight, packing.key]

    def _add_kernel(
        self,
        key: str,
        replaces: Program,
        given: tuple[TensorView, ...],
        *,
        made: tuple[TensorView, ...],
        replaced: Sequence[Launch],
        derives: bool = False,
        packed: tuple[int, ...] = (),
        sums: int = -1,
    ) -> None:
        """Add a launch of a compiled function, at the user's line of those that it replaces."""
        callee = Kernel(len(self._functions), replaces, derives, packed)
        n_derived = len(given) - len(replaces.inputs)
        function, proof = self._kernels.function(
            key, callee.name, replaces, n_derived=n_derived, sums=sums
        )
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
        self._functions.append(function)

    def fused(
        self, bound: BoundProgram, kept: Mapping[tuple[str, str], int], choice: Choice | None
    ) -> Fused:
        rewritten = rewrite(self._program, self.launches, self.values)
        bindings = dataclasses.replace(
            bound.bindings.moved(rewritten.positions), kernels=tuple(self._functions)
        )
        fusion = Fusion(
            tuple(self._regions),
            tuple(self.values[view.value].size_bytes for view in self._packed.values()),
            dict(kept),
            tuple(self._proofs),
            choice,
            self._kernels.cache_refusal,
        )
        return Fused(BoundProgram(rewritten.program, bindings), fusion)

    def _scratch(self, size_bytes: int) -> TensorView:
        index = len(self.values)
        self.values.append(
            Value(index, Role.SCRATCH, (size_bytes,), (1,), "uint8", size_bytes, "a kernel's own")
        )
        return TensorView(index, 0, (size_bytes,), (1,), "uint8")

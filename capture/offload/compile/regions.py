"""Which launches form a kernel."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence, Set

from offload.compile import endings
from offload.compile.extraction import Extracted, extract, last_uses
from offload.compile.functional import make_functional
from offload.compile.obstacles import EMPTY, LOOP_OPERATORS, WRITES, why_not
from offload.compile.packing import Packing, pack, pays
from offload.compile.refusal import UnsupportedRegion
from offload.compile.templates import TEMPLATES, function, matrix_of, n_rows
from offload.program import Launch, Program, TensorView


class Kind(enum.StrEnum):
    """How a region's kernel is made."""

    LOOPS = "loops"  # by torch's Inductor
    TEMPLATE = "template"  # by offload's template: a product with its activation, or attention


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive launches that become one kernel.

    Attributes:
        kind: how it is made.
        first, end: the first launch, and behind the last one.
        extracted: these launches as a Program.
        packing: for a product that reads its matrix as panels: how these are made.
        weight: the Value of that matrix.
    """

    kind: Kind
    first: int
    end: int
    extracted: Extracted
    packing: Packing | None = None
    weight: int = -1

    @functools.cached_property
    def key(self) -> str:
        """Equal for regions with the same kernel."""
        return f"{self.kind}-{'' if self.packing is None else 'packed-'}{self.extracted.key}"


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """The division of a Program into kernels and other launches.

    Attributes:
        found: in order, disjoint.
        kept: by index, why a launch stays as recorded.
    """

    found: tuple[Region, ...]
    kept: dict[int, str]


MOST_LAUNCHES = 128
"""In one region: beyond, its compilation takes longer than more launches cost."""


def find_regions(
    program: Program,
    kept_operators: Mapping[str, str],
    packable: Set[int] = frozenset(),
    *,
    has_templates: bool = True,
) -> Regions:
    """Group the launches of a Program, in its order.

    Args:
        program: with the launches.
        kept_operators: operators that stay as recorded, with the reason for messages.
        packable: the weights that may be packed.
        has_templates: there are templates for the device; else there are loops alone.
    """
    finder = _Finder(program, kept_operators, packable, has_templates=has_templates)
    finder.find(0, len(program.launches))
    return Regions(tuple(finder.found), finder.kept)


def divide(program: Program, region: Region, *, has_templates: bool = True) -> Regions:
    """The regions of both halves of a region of loops with several launches."""
    finder = _Finder(program, {}, has_templates=has_templates)
    middle = (region.first + region.end) // 2
    finder.find(region.first, middle)
    finder.find(middle, region.end)
    return Regions(tuple(finder.found), finder.kept)


class _Finder:
    """Collects regions and the launches that stay as recorded."""

    def __init__(
        self,
        program: Program,
        kept_operators: Mapping[str, str],
        packable: Set[int] = frozenset(),
        *,
        has_templates: bool,
    ) -> None:
        self._templates = frozenset(TEMPLATES) if has_templates else frozenset()
        self.found: list[Region] = []
        self.kept: dict[int, str] = {}
        self._program = program
        self._kept_operators = kept_operators
        self._packable = packable
        self._last_use = last_uses(program)

    def find(self, first: int, end: int) -> None:
        """Divide the launches from `first` up to, and excluding, `end`."""
        launches = self._program.launches
        reasons = {at: self._reason(launches[at]) for at in range(first, end)}
        at = first
        while at < end:
            if reasons[at]:
                self.kept[at] = reasons[at]
                at += 1
            elif launches[at].name in self._templates:
                stop = at + 1
                most = min(end, stop + endings.MOST_LAUNCHES)
                while stop < most and not reasons[stop] and endings.may_end(launches[stop]):
                    stop += 1
                at = self._add_template(at, stop)
            else:
                stop = at + 1
                while (
                    stop < min(end, at + MOST_LAUNCHES)
                    and not reasons[stop]
                    and launches[stop].name not in self._templates
                ):
                    stop += 1
                at = self._add_loops(at, stop)

    def _reason(self, launch: Launch) -> str:
        """Why a launch stays as recorded; empty if it may be fused."""
        if kept := self._kept_operators.get(launch.name):
            return kept
        if launch.name in TEMPLATES and launch.name not in (self._templates | LOOP_OPERATORS):
            return _OF_LIBRARIES
        places = launch.results[1] if launch.name in _POOLS else None
        if places is not None and self._last_use[places.value] > launch.index:
            return "returns the indices of maxima, and another index where several numbers are NaN"
        empty = (view.value for view in launch.made() if not self._size_bytes(view))
        if any(self._last_use[index] > launch.index for index in empty):
            return EMPTY
        return why_not(self._program, launch)

    def _size_bytes(self, view: TensorView) -> int:
        return self._program.values[view.value].size_bytes

    def _add_template(self, at: int, stop: int) -> int:
        """Add a template's region that begins at a launch, with its ending before `stop`."""
        region, reason = _template(self._program, at, stop, self._last_use)
        if region is None:
            if self._program.launches[at].name in LOOP_OPERATORS:
                return self._add_loops(at, at + 1)
            self.kept[at] = reason
            return at + 1
        self.found.append(_packed(self._program, region, self._packable))
        return region.end

    def _add_loops(self, first: int, end: int) -> int:
        """Add loops of launches from `first`, as many up to `end` as can be followed."""
        followed = make_functional(self._program, first, end, self._last_use)
        if followed is None:
            self.kept[first] = WRITES
            return first + 1
        inside = extract(followed.program, first, followed.end, followed.used_later)
        self.found.append(Region(Kind.LOOPS, first, followed.recorded_end, inside))
        return followed.recorded_end


def _template(
    program: Program, at: int, stop: int, last_use: Sequence[int]
) -> tuple[Region | None, str]:
    """The region of a template that begins at a launch, including its ending; or why not.

    The ending is as many of the launches behind it and before `stop` as possible.
    """
    reason = ""
    for end in range(stop, at, -1):
        followed = make_functional(program, at, end, last_use)
        if followed is None or (followed.recorded_end, followed.end) != (end, end):
            continue
        extracted = extract(followed.program, at, end, followed.used_later)
        try:
            function("kernel", extracted.program)
        except UnsupportedRegion as error:
            reason = str(error)
        else:
            return Region(Kind.TEMPLATE, at, end, extracted), ""
    return None, reason


def _packed(program: Program, region: Region, packable: Set[int]) -> Region:
    """The region with a packed matrix, where possible and faster."""
    matrix = matrix_of(program.launches[region.first])
    rows = n_rows(program.launches[region.first])
    if matrix is None or matrix.value not in packable or not pays(rows):
        return region
    try:
        packing = pack(program, matrix)
    except UnsupportedRegion:
        return region  # its matrix is read in place
    return dataclasses.replace(region, packing=packing, weight=matrix.value)


_OF_LIBRARIES = "computed by a library of the device"

_POOLS = frozenset(
    f"aten::{name}"
    for name in (
        "adaptive_max_pool2d", "adaptive_max_pool3d",
        "max_pool2d_with_indices", "max_pool3d_with_indices",
    )
)  # fmt: skip

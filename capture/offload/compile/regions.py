"""Which launches become a kernel together."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from offload.compile.extraction import Extracted, extract, is_plain, last_uses, whole_view
from offload.compile.functional import functional_name, make_functional
from offload.compile.packing import Packing, pack, pays
from offload.compile.refusal import UnsupportedRegion
from offload.compile.templates import ACTIVATIONS, TEMPLATES, function, matrix_of
from offload.program import Launch, Operator, Program, Role, TensorView
from offload.torch_names import find_overload


class Kind(enum.StrEnum):
    """How a region's kernel is made."""

    LOOPS = "loops"  # by torch's Inductor
    TEMPLATE = "template"  # by one of ours: a product with its activation, or attention


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Launches in a row that become one kernel.

    Attributes:
        kind: how it is made.
        first, end: from which launch up to and without which one.
        extracted: these launches by themselves.
        packing: of a product that reads its matrix as panels: how these are made.
        weight: of such a product: of which Value.
    """

    kind: Kind
    first: int
    end: int
    extracted: Extracted
    packing: Packing | None = None
    weight: int = -1

    @property
    def key(self) -> str:
        """The same for regions of which the same kernel is made."""
        return f"{self.kind}-{'' if self.packing is None else 'packed-'}{self.extracted.key}"


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """What of a Program becomes kernels.

    Attributes:
        found: in order; no two have a launch in common.
        kept: by index, why a launch stays as recorded.
    """

    found: tuple[Region, ...]
    kept: dict[int, str]


LOOP_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax", "_softmax", "_to_copy", "amax", "amin", "any", "any.dim", "all", "all.dim",
        "argmax", "argmin", "cat", "clone", "embedding", "gather", "index_select", "max.dim",
        "mean", "mean.dim", "min.dim", "native_group_norm", "native_layer_norm",
        "select_scatter", "slice_scatter", "sum", "sum.dim_IntList", "var.correction",
        "var_mean.correction", "where.self", "_native_batch_norm_legit_no_training",
        "constant_pad_nd", "stack", "full_like", "zeros_like", "ones_like", "arange.start_step",
        "tril", "triu", "flip", "roll", "repeat",
    )
)  # fmt: skip
"""Besides those that torch tags as pointwise: what Inductor makes loops of, without a fallback."""

MOST_LAUNCHES = 128
"""In one region: beyond, its compilation takes longer than more launches cost."""

_DTYPES = frozenset(
    (
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    )
)


def find_regions(
    program: Program, kept_operators: Mapping[str, str], packable: Set[int] = frozenset()
) -> Regions:
    """Group the launches of a Program, in its order.

    Args:
        program: whose launches.
        kept_operators: operators that stay as recorded, with the reason for people.
        packable: the weights that may be packed.
    """
    found: list[Region] = []
    kept: dict[int, str] = {}
    last_use = last_uses(program)
    reasons = [
        kept_operators.get(launch.name) or _why_not(program, launch) for launch in program.launches
    ]
    at = 0
    while at < len(program.launches):
        if reasons[at]:
            kept[at] = reasons[at]
            at += 1
        elif program.launches[at].name in TEMPLATES:
            region, reason = _template(program, at, last_use, reasons)
            if region is None:
                kept[at] = reason
            else:
                found.append(_packed(program, region, packable))
            at += 1 if region is None else region.end - at
        else:
            end = at
            while end < min(len(program.launches), at + MOST_LAUNCHES) and _is_loop(
                program, end, reasons
            ):
                end += 1
            followed = make_functional(program, at, end, last_use)
            if followed is None:
                kept[at] = _WRITES
                at += 1
                continue
            inside = extract(followed.program, at, followed.end, followed.used_later)
            found.append(Region(Kind.LOOPS, at, followed.end, inside))
            at = followed.end
    return Regions(tuple(found), kept)


def _is_loop(program: Program, at: int, reasons: Sequence[str]) -> bool:
    return not reasons[at] and program.launches[at].name not in TEMPLATES


def _template(
    program: Program, at: int, last_use: Sequence[int], reasons: Sequence[str]
) -> tuple[Region | None, str]:
    """The region of a template that begins at a launch, its activation with it; or why not."""
    (made, *_) = program.launches[at].made()
    is_activated = (
        at + 1 < len(program.launches)
        and not reasons[at + 1]
        and program.launches[at + 1].name in ACTIVATIONS
        and [view.value for view in program.launches[at + 1].views()] == [made.value]
        and last_use[made.value] == at + 1
    )
    reason = ""
    for end in [at + 2, at + 1] if is_activated else [at + 1]:
        extracted = extract(program, at, end, last_use)
        try:
            function("kernel", extracted.program)
        except UnsupportedRegion as error:
            reason = str(error)
        else:
            return Region(Kind.TEMPLATE, at, end, extracted), ""
    return None, reason


def _packed(program: Program, region: Region, packable: Set[int]) -> Region:
    """The region with a packed matrix, where that may be and pays."""
    matrix = matrix_of(program.launches[region.first])
    (made, *_) = program.launches[region.first].made()
    if matrix is None or matrix.value not in packable or not pays(made.shape[0]):
        return region
    return dataclasses.replace(region, packing=pack(program, matrix), weight=matrix.value)


def _why_not(program: Program, launch: Launch) -> str:
    """Why a launch stays as recorded; empty where it may be fused."""
    return next((why for is_so, why in _OBSTACLES if is_so(program, launch)), "")


def _used(launch: Launch) -> tuple[TensorView, ...]:
    return (*launch.views(), *launch.made())


def _is_known(operator: str) -> bool:
    if operator in LOOP_OPERATORS or operator in TEMPLATES:
        return True
    overload = find_overload(operator)
    return torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable


def _is_followed(program: Program, launch: Launch) -> bool:
    """Whether a write in place may be to memory that nobody else sees."""
    return bool(functional_name(launch)) and all(
        program.values[index].role in (Role.ACTIVATION, Role.OUTPUT) for index in launch.writes
    )


_WRITES = "writes what it is given"

_OBSTACLES: tuple[tuple[Callable[[Program, Launch], bool], str], ...] = (
    (
        lambda _, launch: not (isinstance(launch.callee, Operator) and launch.callee.is_aten),
        "not an operator of torch's own",
    ),
    (lambda _, launch: launch.random, "draws random numbers"),
    (lambda _, launch: launch.guard is not None or launch.guards_shape, "is guarded"),
    (
        lambda program, launch: (
            set(launch.writes) != {view.value for view in launch.made()}
            and not _is_followed(program, launch)
        ),
        _WRITES,
    ),
    (
        lambda _, launch: (
            not launch.results or (None in launch.results and not functional_name(launch))
        ),
        "gives no new tensor",
    ),
    (
        lambda _, launch: not _is_known(launch.name) and not functional_name(launch),
        "no kernel is made of this operator",
    ),
    (
        lambda program, launch: any(
            view.conjugate
            or view.negative
            or not {view.dtype, program.values[view.value].dtype} <= _DTYPES
            for view in _used(launch)
        ),
        "of a dtype, or of a lazy view, that kernels do not take",
    ),
    (
        lambda program, launch: (
            not all(is_plain(program.values[view.value]) for view in _used(launch))
        ),
        "of a tensor that is empty, that does not fill its memory, or a part of a larger one",
    ),
    (
        lambda program, launch: any(
            view != whole_view(program.values[view.value]) for view in launch.made()
        ),
        "gives a part of what it makes",
    ),
)

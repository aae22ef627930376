"""Which launches form a kernel."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from offload.compile import endings
from offload.compile.extraction import Extracted, extract, is_plain, last_uses, whole_view
from offload.compile.functional import functional_name, make_functional
from offload.compile.packing import Packing, pack, pays
from offload.compile.refusal import UnsupportedRegion
from offload.compile.templates import TEMPLATES, function, matrix_of, n_rows
from offload.interpreter.torch_names import find_overload
from offload.program import Launch, Operator, Program, Role, TensorView, Value, is_dense


class Kind(enum.StrEnum):
    """How a region's kernel is made."""

    LOOPS = "loops"  # by torch's Inductor
    TEMPLATE = "template"  # by a template of ours: a product with its activation, or attention


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


LOOP_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_adaptive_avg_pool2d", "_chunk_cat", "_log_softmax",
        "_native_batch_norm_legit_no_training", "_prelu_kernel", "_safe_softmax", "_softmax",
        "_to_copy", "adaptive_max_pool2d", "adaptive_max_pool3d", "addmv", "addr", "all", "all.dim",
        "amax", "amin", "aminmax", "any", "any.dim", "arange.start_step", "argmax", "argmin",
        "as_strided_copy", "as_strided_scatter", "avg_pool2d", "avg_pool3d",
        "binary_cross_entropy_with_logits", "block_diag", "cat", "channel_shuffle", "clone",
        "constant_pad_nd", "count_nonzero", "diag_embed", "diagonal_copy", "diagonal_scatter",
        "dist", "dot", "embedding", "expand_copy", "fill.Scalar", "flip", "floor_divide",
        "full_like", "gather", "glu", "hardswish", "huber_loss", "index.Tensor", "index_add",
        "index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_put", "index_select",
        "log_sigmoid_forward", "logsumexp", "masked_fill.Tensor", "max", "max.dim",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "max_unpool3d",
        "mean", "mean.dim", "min", "min.dim", "mse_loss", "mv", "nansum", "narrow_copy",
        "native_group_norm", "native_layer_norm", "new_full", "new_ones", "new_zeros",
        "nll_loss_forward", "norm.ScalarOpt_dim", "ones_like", "permute_copy", "pixel_shuffle",
        "pixel_unshuffle", "prod", "prod.dim_int", "put", "reflection_pad1d", "renorm", "repeat",
        "replication_pad1d", "replication_pad2d", "roll", "rot90", "rsub.Tensor", "scatter.reduce",
        "scatter.src", "scatter_add", "select_scatter", "slice_scatter", "smooth_l1_loss",
        "soft_margin_loss", "split_with_sizes_copy", "squeeze_copy", "stack", "std.correction",
        "std_mean.correction", "sum", "sum.dim_IntList", "t_copy", "take", "trace",
        "transpose_copy.int", "tril", "triu", "unbind_copy.int", "unfold_copy", "unsqueeze_copy",
        "var.correction", "var_mean.correction", "vdot", "view_copy", "where.self", "zeros_like",
    )
)  # fmt: skip
"""Operators that Inductor makes loops of without a fallback, besides those that torch tags as
pointwise.
"""

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
            return _EMPTY
        return _why_not(self._program, launch)

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
            self.kept[first] = _WRITES
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


def _why_not(program: Program, launch: Launch) -> str:
    """Why a launch stays as recorded; empty if it may be fused."""
    whys = (why for is_so, why in _OBSTACLES if is_so(program, launch))
    return next(whys, "") or _unlike(program, launch)


def _unlike(program: Program, launch: Launch) -> str:
    """Why kernels do not support a tensor of a launch; empty if they do."""
    for view in _used(program, launch):
        if view.conjugate or view.negative:
            return "of a lazy view, conjugated or negated"
        if why := _why_not_of(program.values[view.value], view.dtype):
            return why
    if any(view != whole_view(program.values[view.value]) for view in launch.made()):
        return "returns a part of the tensor that it makes"
    return ""


def _why_not_of(value: Value, seen_as: str) -> str:
    """Why kernels do not support a Value; empty if they do."""
    if unknown := [dtype for dtype in (seen_as, value.dtype) if dtype not in _DTYPES]:
        return f"of {unknown[0]}"
    if not value.size_bytes:
        return _EMPTY
    if not is_dense(value.shape, value.strides):
        return "of a tensor with gaps, or with elements that share memory"
    if not is_plain(value):
        return "of a tensor that is a part of larger memory, or in a device's format"
    return ""


def _used(program: Program, launch: Launch) -> tuple[TensorView, ...]:
    """The operands of a launch, and its results without empty tensors."""
    made = (view for view in launch.made() if program.values[view.value].size_bytes)
    return (*launch.views(), *made)


def _is_known(operator: str) -> bool:
    if operator in LOOP_OPERATORS or operator in TEMPLATES:
        return True
    overload = find_overload(operator)
    return torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable


def _is_followed(program: Program, launch: Launch) -> bool:
    """Whether an in-place write may be to memory that is not visible elsewhere."""
    return bool(functional_name(launch)) and all(
        program.values[index].role in (Role.ACTIVATION, Role.OUTPUT) for index in launch.writes
    )


_WRITES = "writes its arguments"
_EMPTY = "of an empty tensor"
_OF_LIBRARIES = "computed by a library of the device"

_POOLS = frozenset(
    f"aten::{name}"
    for name in (
        "adaptive_max_pool2d", "adaptive_max_pool3d",
        "max_pool2d_with_indices", "max_pool3d_with_indices",
    )
)  # fmt: skip


def _base_name(launch: Launch) -> str:
    """The name of torch's operator, without its overload and in-place mark."""
    return launch.name.removeprefix("aten::").partition(".")[0].removesuffix("_")


def _steps_beyond_half(launch: Launch) -> bool:
    """Whether it computes the next number in a 16-bit dtype, which Inductor widens."""
    is_half = any(view.dtype in ("bfloat16", "float16") for view in launch.views())
    return _base_name(launch) == "nextafter" and is_half


def _rounds_quotients(program: Program, launch: Launch) -> bool:
    """Whether Inductor rounds a floating-point quotient that torch computes exactly, by `fmod`.

    `fmod` itself is NaN in a compiler's fast form if its arguments are far apart.
    """
    name = _base_name(launch)
    is_floor = name in ("floor_divide", "fmod", "remainder") or (
        name == "div" and "floor" in launch.arguments
    )
    return is_floor and any("float" in view.dtype for view in _used(program, launch))


def _truncates_quotients(program: Program, launch: Launch) -> bool:
    """Whether it divides integers as C++ does, where division by zero would end the process."""
    is_trunc = _base_name(launch) == "div" and "trunc" in launch.arguments
    return is_trunc and not any("float" in view.dtype for view in launch.views())


def _special_powers(launch: Launch) -> bool:
    """Whether torch computes this power as a root, with other zeros and infinities."""
    if _base_name(launch) not in ("pow", "float_power"):
        return False
    is_half = any(view.dtype == "float16" for view in launch.views())
    return any(
        isinstance(one, (int, float)) and (one == -0.5 or (is_half and one == 0.5))
        for one in launch.arguments
    )


def _sums_bytes(launch: Launch) -> bool:
    """Whether it adds up 8-bit numbers in 8 bits, which Inductor's vectors do not."""
    made = [view.dtype for view in launch.made()]
    return _base_name(launch) in ("sum", "prod") and made[:1] in (["int8"], ["uint8"])


_OBSTACLES: tuple[tuple[Callable[[Program, Launch], bool], str], ...] = (
    (
        lambda _, launch: not (isinstance(launch.callee, Operator) and launch.callee.is_aten),
        "not an operator of torch's own",
    ),
    (lambda _, launch: launch.random, "draws random numbers"),
    (
        lambda _, launch: _base_name(launch) == "erf",
        "torch's vectors compute it from 1, and lose precision near 0",
    ),
    (
        lambda _, launch: _base_name(launch) == "acosh",
        "torch's vectors overflow beyond 1e19, which acosh does not",
    ),
    (
        lambda _, launch: "_polynomial_" in _base_name(launch),
        "a compiler's fast form of its recurrence differs from torch's for NaN",
    ),
    (
        lambda _, launch: _steps_beyond_half(launch),
        "Inductor computes the next number in float32, which 16 bits cannot represent",
    ),
    (
        lambda _, launch: _base_name(launch) == "erfinv",
        "Inductor's is inexact near 1 and -1",
    ),
    (
        lambda _, launch: _special_powers(launch),
        "torch computes it as a root, whose zeros and infinities Inductor's power does not have",
    ),
    (
        lambda _, launch: _sums_bytes(launch),
        "sums in 8 bits, which Inductor's loops do not compute",
    ),
    (
        _truncates_quotients,
        "divides integers, where Inductor's loops do not detect division by zero",
    ),
    (_rounds_quotients, "computes a remainder exactly, which Inductor's loops do not"),
    (lambda _, launch: launch.guard is not None or launch.guards_shape, "is guarded"),
    (
        lambda program, launch: (
            set(launch.writes) != {view.value for view in launch.made()}
            and not _is_followed(program, launch)
        ),
        _WRITES,
    ),
    (
        lambda _, launch: not _is_known(launch.name) and not functional_name(launch),
        "no kernel is made for this operator",
    ),
    (
        lambda _, launch: (
            not launch.results or (None in launch.results and not functional_name(launch))
        ),
        "returns no new tensor",
    ),
)

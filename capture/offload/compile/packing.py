"""Weights packed for the template of products: when that pays, and the packed bytes."""

from __future__ import annotations

import dataclasses
import functools
import math

from offload.compile.extraction import is_plain, leaves, program_key, whole_view
from offload.compile.refusal import UnsupportedRegion
from offload.program import (
    ITEM_BYTES,
    BoundProgram,
    Launch,
    Operator,
    Program,
    Result,
    Role,
    Symbol,
    TensorView,
    Value,
    contiguous_strides,
)
from offload.program.structure import Structure

PANEL_COLUMNS = 32
"""Columns of a panel, as in `kernels/panels.hpp` (`kPanelColumns`)."""

_ROWS_SIDE_BY_SIDE = {"float32": 1, "bfloat16": 2}
_BITS = {"float32": "int32", "bfloat16": "int16"}
"""Panels are compared as integers, of which all bits count."""

FEWEST_ROWS = 2
MOST_ROWS = 128
"""Rows of a product whose weight is packed. On Zen 5, one thread, packed weights took 0.3 to 0.6 of
the time of weights in place at 2 to 32 rows, from the caches and from memory, 0.7 to 0.9 at 64 and
128 rows, and the same at one row, in float32 as in bfloat16 (`bench/kernels/products.cpp`).
"""


def packable_weights(bound: BoundProgram) -> frozenset[int]:
    """The weights whose writes are noticed, and that launches do not write.

    Other processes write shared memory unnoticed. Weights in files have separate memory.
    """
    written = {index for launch in bound.program.launches for index in launch.writes}
    known = {
        index
        for index, holders in bound.bindings.weights.items()
        if not any(holder.is_inference() or holder.is_shared() for holder in holders)
    }
    return frozenset(
        index
        for index in (*known, *bound.bindings.stored)
        if index not in written and is_plain(bound.program.values[index])
    )


def pays(rows: int) -> bool:
    """Whether a product of so many rows is faster with a packed weight."""
    return FEWEST_ROWS <= rows <= MOST_ROWS


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a matrix of a weight becomes panels.

    Attributes:
        matrix: K rows of N columns of the program's only input.
        program: the launches that make the panels, as integers of the same bits: its only input is
            the whole weight, its only result ceil(N / 32) panels of K rows of 32 columns, the last
            ones zero if N is not a multiple. In bfloat16 two rows are interleaved, as pairs of each
            column's numbers; the last of a pair is zero if K is odd.
    """

    matrix: TensorView
    program: Program

    @functools.cached_property
    def key(self) -> str:
        """The same for matrices whose panels are made the same way."""
        return f"packing-{program_key(self.program)}"


def pack(program: Program, matrix: TensorView) -> Packing:
    """Return the packing of a matrix of K rows and N columns of a plain weight.

    Raises:
        UnsupportedRegion: there are no panels of its dtype, or the weight's numbers have another
            size.
    """
    weight = program.values[matrix.value]
    if matrix.dtype not in _BITS or ITEM_BYTES[weight.dtype] != ITEM_BYTES[matrix.dtype]:
        raise UnsupportedRegion(f"a matrix of {matrix.dtype} is not packed")
    dtype, paired = _BITS[matrix.dtype], _ROWS_SIDE_BY_SIDE[matrix.dtype]
    depth, columns = matrix.shape
    panels, pairs = -(-columns // PANEL_COLUMNS), -(-depth // paired)
    values = [dataclasses.replace(weight, index=0, role=Role.INPUT, dtype=dtype)]
    turned = TensorView(0, matrix.offset_bytes, (columns, depth), matrix.strides[::-1], dtype)
    launches = []
    padded_shape = (panels * PANEL_COLUMNS, pairs * paired)
    if padded_shape != turned.shape:
        values.append(_made(1, Role.ACTIVATION, padded_shape, dtype))
        lacking = (0, padded_shape[1] - depth, 0, padded_shape[0] - columns)
        launches.append(_launch(0, "aten::constant_pad_nd", (turned, lacking, 0), values[1]))
        turned = whole_view(values[1])
    shape = (panels, pairs, PANEL_COLUMNS, paired)
    values.append(_made(len(values), Role.OUTPUT, shape, dtype))
    column_stride, depth_stride = turned.strides
    panel_strides = (
        PANEL_COLUMNS * column_stride,
        paired * depth_stride,
        column_stride,
        depth_stride,
    )
    view = TensorView(turned.value, turned.offset_bytes, shape, panel_strides, dtype)
    order = Symbol("memory_format", "contiguous_format")
    launches.append(_launch(len(launches), "aten::clone", (view, order), values[-1]))
    inside = Program(
        device=program.device,
        values=tuple(values),
        launches=tuple(launches),
        inputs=(whole_view(values[0]),),
        results=(Result(whole_view(values[-1])),),
        arguments_structure=Structure(
            "tuple", (leaves(1), Structure("dict", type_name="dict")), type_name="tuple"
        ),
        result_structure=leaves(1),
    )
    return Packing(dataclasses.replace(matrix, value=0), inside)


def _made(index: int, role: Role, shape: tuple[int, ...], dtype: str) -> Value:
    strides = contiguous_strides(shape)
    size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    return Value(index, role, shape, strides, dtype, size_bytes, "panels")


def _launch(index: int, operator: str, arguments: tuple[object, ...], made: Value) -> Launch:
    views = [one for one in arguments if isinstance(one, TensorView)]
    return Launch(
        index=index,
        callee=Operator(operator),
        arguments=arguments,  # type: ignore[arg-type]
        results=(whole_view(made),),
        reads=tuple(view.value for view in views),
        writes=(made.index,),
        random=False,
        guard=None,
        guards_shape=False,
        source="",
    )

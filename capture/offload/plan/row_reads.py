"""Finds weights of a Program that are tables of which launches read only some rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from offload.program import ITEM_BYTES, Launch, Operator, Program, Role, TensorView

_INDEX_DTYPES = ("int32", "int64")


@dataclasses.dataclass(frozen=True, slots=True)
class RowReads:
    """The row reads of a weight that launches use only as the table of an embedding.

    Attributes:
        row_bytes: of each row; the same for all launches.
        n_rows: by launch that reads it, ascending, the number of rows: one for each index.
    """

    row_bytes: int
    n_rows: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        """The most bytes that one launch reads."""
        return self.row_bytes * max(self.n_rows)


def row_reads(program: Program) -> Mapping[int, RowReads]:
    """Find the weights of which launches read only rows, by Value.

    A launch of `aten::embedding` copies rows of its table into its result, whatever its other
    arguments, which concern gradients. It counts if rows are contiguous in the table and in the
    result. A weight that a launch writes, or reads otherwise, is no such table.
    """
    reads: dict[int, list[tuple[int, int]]] = {
        value.index: [] for value in program.of_role(Role.WEIGHT)
    }
    others: set[int] = set()
    for launch in program.launches:
        rows = _rows_of(launch)
        touched = {*launch.reads, *launch.writes, *(view.value for view in launch.views())}
        for index in touched & reads.keys():
            if rows is not None and rows[0] == index:
                reads[index].append(rows[1:])
            else:
                others.add(index)
    return {
        index: RowReads(found[0][0], tuple(n_rows for _, n_rows in found))
        for index, found in reads.items()
        if index not in others and len({row_bytes for row_bytes, _ in found}) == 1
    }


def _rows_of(launch: Launch) -> tuple[int, int, int] | None:
    """The table's Value, the bytes of a row, and the number of rows of an embedding; else None."""
    if launch.callee != Operator("aten::embedding") or len(launch.results) != 1:
        return None
    table, indices = launch.arguments[:2]
    result = launch.results[0]
    if not isinstance(table, TensorView) or not isinstance(indices, TensorView) or result is None:
        return None
    is_plain = (
        len(table.shape) == 2
        and table.shape[1] > 0
        and _lies_side_by_side(table)
        and _lies_side_by_side(result)
        and result.shape == (*indices.shape, table.shape[1])
        and result.dtype == table.dtype
        and indices.dtype in _INDEX_DTYPES
        and not indices.negative
        and indices.value != table.value
        and set(launch.writes) == {result.value}
        and launch.guard is None
        and not launch.guards_shape
    )
    if not is_plain:
        return None
    return table.value, table.shape[1] * ITEM_BYTES[table.dtype], math.prod(indices.shape)


def _lies_side_by_side(view: TensorView) -> bool:
    """Whether its elements are contiguous in memory, without torch's lazy bits."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected and 0 not in view.shape:
            return False
        expected *= size
    return not (view.conjugate or view.negative)

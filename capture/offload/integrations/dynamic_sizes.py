"""The sizes of a graph that torch has traced with symbolic sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import Dim

from offload.host import SizedExecutable


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicSizes:
    """The varying sizes of a graph's inputs.

    Attributes:
        shapes: for each input the element of `capture(dynamic_shapes=)`.
        axes: for each varying size its input and axis; -1: the input is an integer.
        names: their Dims, in the same order.
    """

    shapes: tuple[Any, ...]
    axes: tuple[tuple[int, int], ...]
    names: tuple[str, ...]

    def rest_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers other than sizes, which also distinguish captures."""
        integers = {position for position, axis in self.axes if axis < 0}
        return tuple(
            repr(given)
            for position, given in enumerate(args)
            if not isinstance(given, torch.Tensor) and position not in integers
        )

    def are_plain(self, args: Sequence[Any]) -> bool:
        """Whether the tensors with varying sizes are contiguous."""
        return all(args[position].is_contiguous() for position, axis in self.axes if axis >= 0)

    def fit(self, run: SizedExecutable, args: Sequence[Any]) -> bool:
        """Whether an executable accepts a call of these sizes, as recorded."""
        sizes: dict[str, int] = {}
        for name, (position, axis) in zip(self.names, self.axes, strict=True):
            given = args[position]
            size = given if axis < 0 else int(given.shape[axis])
            if sizes.setdefault(name, size) != size:
                return False
        # Otherwise results may have other layouts.
        return self.are_plain(args) and run.accepts(sizes)


def dynamic_sizes(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> DynamicSizes | None:
    """The varying sizes of a graph's inputs; None if there are none, or one is not a plain symbol.

    Args:
        graph_module: the traced graph, which may note at each input what it was traced with.
        example_inputs: used where it notes nothing: tensors, whose sizes may be symbolic, and
            numbers.
    """
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    traced = [
        node.meta.get("example_value", given)
        for node, given in zip(inputs, example_inputs, strict=True)
    ]
    dims: dict[str, Any] = {}
    shapes: list[Any] = []
    axes: list[tuple[int, int]] = []
    names: list[str] = []
    for position, given in enumerate(traced):
        is_tensor = isinstance(given, torch.Tensor)
        sizes = enumerate(given.shape) if is_tensor else [(-1, given)]
        varying: dict[int, Any] = {}
        for axis, size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            name = _name_of(size)
            if name is None:
                return None
            varying[axis] = dims.setdefault(name, Dim(name))
            axes.append((position, axis))
            names.append(name)
        shapes.append(varying if is_tensor and varying else varying.get(-1))
    return DynamicSizes(tuple(shapes), tuple(axes), tuple(names)) if dims else None


def _name_of(size: torch.SymInt) -> str | None:
    """The symbol of a size; None if it is computed from symbols."""
    expression = size.node.expr
    return str(expression) if isinstance(expression, sympy.Symbol) else None

"""Translates a region of launches to a graph of torch's, as compilers take it.

torch's tracer (`make_fx`) is not used: it sets a flag of the whole process
(`torch.fx._symbolic_trace`), so that compiled functions called by other threads meanwhile are
refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from offload.compile.refusal import UnsupportedRegion
from offload.compile.views import find_steps
from offload.interpreter.cuda_guard import keep_cuda_guard
from offload.interpreter.torch_names import (
    find_dtype,
    find_overload,
    positional_and_named,
    symbol_object,
)
from offload.program import ITEM_BYTES, Argument, Bindings, Launch, Program, Symbol, TensorView


def trace(
    program: Program, decompositions: Mapping[Any, Callable[..., Any]], device: torch.device
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return a region as a graph of torch's operators, with fake tensors as inputs.

    Views are made by view operators, and each result is contiguous in the order of its memory.

    Args:
        program: the region as a Program.
        decompositions: the replacement of each operator.
        device: of the fake tensors, whatever device the launches name.

    Raises:
        UnsupportedRegion: a view cannot be made by view operators, or a tensor has no origin.
    """
    keep_cuda_guard()
    fakes = FakeTensorMode()
    with fakes:
        inputs = [
            torch.empty_strided(
                view.shape, view.strides, dtype=find_dtype(view.dtype), device=device
            )
            for view in program.inputs
        ]
    mode = _GraphMode(decompositions)
    for number, tensor in enumerate(inputs):
        mode.add_input(f"arg{number}_1", tensor)
    with fakes, torch.no_grad(), mode:
        results = _Interpreter(program, device).run(inputs)
    return mode.module(results), inputs


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    return torch.gather(x, dim, _spread(x, dim, index)) if x.dim() else NotImplemented


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    return torch.scatter(x, dim, _spread(x, dim, index), source) if x.dim() else NotImplemented


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: complex = 1
) -> Any:
    if not x.dim():
        return NotImplemented
    return torch.scatter_add(x, dim, _spread(x, dim, index), source * alpha)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    if not x.dim():
        return NotImplemented
    filled = value if isinstance(value, torch.Tensor) else x.new_full((), value)
    return torch.index_put(x, (*[None] * (dim % x.dim()), index), filled)


def _spread(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Indices along a dimension, repeated for all elements of the others."""
    shape = [1] * x.dim()
    shape[dim] = -1
    sizes = list(x.shape)
    sizes[dim] = -1
    return index.to(torch.int64).reshape(shape).expand(sizes)


STRICT_INDICES: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.index_select.default: _index_select,
    torch.ops.aten.index_copy.default: _index_copy,
    torch.ops.aten.index_add.default: _index_add,
    torch.ops.aten.index_fill.int_Scalar: _index_fill,
    torch.ops.aten.index_fill.int_Tensor: _index_fill,
}
"""Operators that refuse negative indices, in terms of operators that also do so in Inductor. The
last two accept them, and would become one that does not.
"""


class _GraphMode(TorchDispatchMode):
    """Records each operator that is called on fake tensors as a node of a graph."""

    def __init__(self, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decompositions = decompositions
        self._graph = torch.fx.Graph()
        self._nodes: dict[int, torch.fx.Node] = {}
        self._held: list[torch.Tensor] = []  # so that no id is reused

    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        self._note(self._graph.placeholder(name), tensor)

    def module(self, results: list[torch.Tensor]) -> torch.fx.GraphModule:
        self._graph.output([self._node(tensor) for tensor in results])
        return torch.fx.GraphModule({}, self._graph)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries a property of a tensor
            return func(*args, **kwargs)
        replaced = self._replaced(func, args, kwargs)
        if replaced is not NotImplemented:
            return replaced
        outcome = func(*args, **kwargs)
        given = tree_map_only(torch.Tensor, self._node, (list(args), kwargs))
        node = self._graph.call_function(func, tuple(given[0]), given[1])
        if isinstance(outcome, torch.Tensor):
            self._note(node, outcome)
        elif isinstance(outcome, (list, tuple)):
            node.meta["val"] = outcome
            for number, tensor in enumerate(outcome):
                if isinstance(tensor, torch.Tensor):
                    self._note(self._graph.call_function(operator.getitem, (node, number)), tensor)
        else:
            raise UnsupportedRegion(f"{func} returns no tensor")
        return outcome

    def _replaced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a decomposition, whose operators are recorded; else NotImplemented."""
        with self:
            if func in self._decompositions:
                return self._decompositions[func](*args, **kwargs)
            return func.decompose(*args, **kwargs)

    def _note(self, node: torch.fx.Node, tensor: torch.Tensor) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._held.append(tensor)

    def _node(self, tensor: torch.Tensor) -> torch.fx.Node:
        try:
            return self._nodes[id(tensor)]
        except KeyError:
            raise UnsupportedRegion("it holds a constant tensor") from None


class _Interpreter:
    """Runs the launches of a region on tensors without memory."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        for view, tensor in zip(self._program.inputs, inputs, strict=True):
            self._tensors[view.value] = tensor
        for launch in self._program.launches:
            outcome = self._call(launch)
            tensors = outcome if isinstance(outcome, (list, tuple)) else [outcome]
            for made, tensor in zip(launch.made(), tensors, strict=True):
                self._tensors[made.value] = tensor
        return [self._in_memory_order(result.view) for result in self._program.results]

    def _call(self, launch: Launch) -> Any:
        overload = find_overload(launch.name)
        arguments = [self._argument(one) for one in launch.arguments]
        positional, named = positional_and_named(overload, arguments)
        return overload(*positional, **named)

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, TensorView):
            return self._view(argument)
        if isinstance(argument, tuple):
            return [self._argument(one) for one in argument]
        if isinstance(argument, Symbol):
            is_device = argument.kind == "device"
            return self._device if is_device else symbol_object(argument, Bindings())
        return argument

    def _view(self, view: TensorView) -> torch.Tensor:
        value, tensor = self._program.values[view.value], self._tensors[view.value]
        if ITEM_BYTES[view.dtype] != ITEM_BYTES[value.dtype]:
            raise UnsupportedRegion(f"{value.dtype} is viewed as {view.dtype}")
        same_place = (view.shape, view.strides, view.offset_bytes) == (
            value.shape,
            value.strides,
            0,
        )
        if not same_place:
            offset = view.offset_bytes // ITEM_BYTES[view.dtype]
            steps = find_steps(value.shape, value.strides, view.shape, view.strides, offset)
            if steps is None:
                raise UnsupportedRegion(f"the view {view} of {value.dtype}{list(value.shape)}")
            tensor = steps.apply(tensor)
        return tensor if view.dtype == value.dtype else tensor.view(find_dtype(view.dtype))

    def _in_memory_order(self, view: TensorView) -> torch.Tensor:
        order = sorted(
            range(len(view.shape)), key=lambda one: (-view.strides[one], -view.shape[one])
        )
        return self._tensors[view.value].permute(order).clone(memory_format=torch.contiguous_format)

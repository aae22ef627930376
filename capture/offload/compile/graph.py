"""From a region of launches to a graph of torch's, as compilers take it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from offload.compile.refusal import UnsupportedRegion
from offload.compile.views import find_steps
from offload.program import ITEM_BYTES, Argument, Bindings, Launch, Program, Symbol, TensorView
from offload.torch_names import find_dtype, find_overload, symbol_object


def trace(
    program: Program, decompositions: dict[Any, Any]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A region as a graph of torch's operators, and fake tensors as its inputs are.

    Views are made of view operators, and each result is contiguous in the order of its memory.

    Args:
        program: the region by itself.
        decompositions: by operator, what it is replaced by.

    Raises:
        UnsupportedRegion: a view is made of no view operators.
    """
    mode = FakeTensorMode()
    with mode:
        inputs = [
            torch.empty_strided(view.shape, view.strides, dtype=find_dtype(view.dtype))
            for view in program.inputs
        ]
    with mode, torch.no_grad():
        graph = make_fx(
            lambda *tensors: _Interpreter(program).run(tensors),
            decomposition_table=decompositions,
            tracing_mode="real",
        )(*inputs)
    return graph, inputs


class _Interpreter:
    """Runs the launches of a region on tensors that are no memory."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._tensors: dict[int, torch.Tensor] = {}

    def run(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        for view, tensor in zip(self._program.inputs, inputs, strict=True):
            self._tensors[view.value] = tensor
        for launch in self._program.launches:
            outcome = self._call(launch)
            tensors = outcome if isinstance(outcome, (list, tuple)) else [outcome]
            for made, tensor in zip(launch.made(), tensors, strict=True):
                self._tensors[made.value] = tensor
        return [self._in_memory_order(result.view) for result in self._program.results]

    def _call(self, launch: Launch) -> Any:
        positional, named = [], {}
        overload = find_overload(launch.name)
        for declared, argument in zip(overload._schema.arguments, launch.arguments, strict=True):
            if declared.kwarg_only:
                named[declared.name] = self._argument(argument)
            else:
                positional.append(self._argument(argument))
        return overload(*positional, **named)

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, TensorView):
            return self._view(argument)
        if isinstance(argument, tuple):
            return [self._argument(one) for one in argument]
        return symbol_object(argument, Bindings()) if isinstance(argument, Symbol) else argument

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

"""Models with tensors of no dimensions on the CPU."""

from __future__ import annotations

import dataclasses

import torch
from hidden_models import Raw
from torch import nn

import offload
from offload import Captured
from offload.interpreter.torch_names import dtype_name
from offload.program import Bindings, BoundProgram, Role, TensorView, Value


def content_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


def with_host_constants(captured: Captured, *inputs: torch.Tensor) -> BoundProgram:
    """The Program with its weights of no dimensions, and these of its inputs, on the host."""
    program = captured.program
    contents = {index: content_of(held[0]) for index, held in captured.bindings.weights.items()}
    contents |= {
        view.value: content_of(given) for view, given in zip(program.inputs, inputs, strict=False)
    }
    values = (
        dataclasses.replace(value, host_content=contents[value.index])
        if value.index in contents and not value.shape
        else value
        for value in program.values
    )
    program = dataclasses.replace(program, values=tuple(values))
    return BoundProgram(program, captured.bindings)


def guarding(*holders: torch.Tensor) -> BoundProgram:
    """A Program that uses no host constant, but was computed from their values."""
    program = offload.capture(torch.sin, torch.ones(3)).program
    index, first = len(program.values), holders[0]
    dtype, content = dtype_name(first.dtype), content_of(first)
    shape, strides = tuple(first.shape), first.stride()
    value = Value(index, Role.WEIGHT, shape, strides, dtype, len(content), "number", content)
    views = tuple(
        TensorView(
            index, one.storage_offset() * one.element_size(), tuple(one.shape), one.stride(), dtype
        )
        for one in holders
    )
    program = dataclasses.replace(
        program, values=(*program.values, value), weight_views={index: views}
    )
    return BoundProgram(program, Bindings(weights={index: holders}))


class Raised(nn.Module):
    """A number and an unseen raw kernel."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.5))
        self.raw = raw

    def forward(self, factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale * factor
        self.raw(y)
        return y

"""Signatures: launches with the same signature have the same cost on one machine."""

from __future__ import annotations

from offload.program import Argument, Launch, Opaque, TensorView


def signature_of(launch: Launch) -> str:
    """The operator with what its duration depends on: dtypes, shapes, strides, other arguments.

    The arguments of an opaque launch do not determine its work: its user's line is included.
    """
    where = f" at {launch.source}" if isinstance(launch.callee, Opaque) else ""
    return f"{launch.name}({', '.join(_describe(one) for one in launch.arguments)}){where}"


def _describe(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(_describe(item) for item in argument) + "]"
    if not isinstance(argument, TensorView):
        return str(argument)
    text = f"{argument.dtype}{list(argument.shape)}"
    expected = 1
    for size, stride in zip(reversed(argument.shape), reversed(argument.strides), strict=True):
        if size != 1 and stride != expected:
            return f"{text} strides {list(argument.strides)}"
        expected *= size
    return text

"""Signatures: launches with the same signature have the same cost on one machine."""

from __future__ import annotations

import hashlib

from offload.program import Argument, Kernel, Launch, Opaque, TensorView


def signature_of(launch: Launch) -> str:
    """The operator with what its duration depends on: dtypes, shapes, strides, other arguments.

    An opaque launch is known by its place in the user's code, as its arguments do not say what it
    does; a kernel by a digest of the launches that it replaces.
    """
    more = ""
    if isinstance(launch.callee, Opaque):
        more = f" at {launch.source}"
    elif isinstance(launch.callee, Kernel):
        replaced = "; ".join(signature_of(one) for one in launch.callee.replaces.launches)
        more = f" of {hashlib.sha256(replaced.encode()).hexdigest()[:16]}"
    return f"{launch.name}({', '.join(_describe(one) for one in launch.arguments)}){more}"


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

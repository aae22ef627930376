"""Signatures: launches with the same signature have the same cost on one machine."""

from __future__ import annotations

import hashlib

from offload.program import Argument, Kernel, Launch, Opaque, TensorView, TritonKernel


def signature_of(launch: Launch) -> str:
    """The operator with what its duration depends on: dtypes, shapes, strides, other arguments.

    An opaque launch is known by its place in the user's code, as its arguments do not say what it
    does; a kernel by a digest of the launches that it replaces, one in Triton by its configuration
    and a digest of its source.
    """
    more = ""
    if isinstance(launch.callee, Opaque):
        more = f" at {launch.source}"
    elif isinstance(launch.callee, Kernel):
        replaced = "; ".join(signature_of(one) for one in launch.callee.replaces.launches)
        more = f" of {_digest(replaced)}"
    elif isinstance(launch.callee, TritonKernel):
        more = f" {launch.callee.configuration} of {_digest(launch.callee.source)}"
    return f"{launch.name}({', '.join(_describe(one) for one in launch.arguments)}){more}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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

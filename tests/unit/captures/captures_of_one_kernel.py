"""Hand-made captures of one kernel in every layout, for discovery."""

from __future__ import annotations

from collections.abc import Callable

from graph_captures import LAYOUTS, Layout, capture, kernel

from offload.backends.captured.relocation.captures import (
    GraphCapture,
)

Arguments = Callable[[Layout], bytes]

LEAVE_OUT = (
    "leave the operator that launches it out of the captured model .* verify=False changes nothing"
)


def of_one_kernel(arguments: Arguments, **changes: object) -> list[GraphCapture]:
    return [capture(kernel(arguments(one)), layout=one, **changes) for one in LAYOUTS]

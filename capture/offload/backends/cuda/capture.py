"""The interface that captures a Program's launches as a CUDA graph, and the GPU of a Program."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from offload.backends.captured.relocation.captures import GraphCapture
from offload.program import BoundProgram, Program


class Capturer(Protocol):
    """Captures a Program's launches, with memory from a pool of discovery."""

    def capture(self, bound: BoundProgram, pool: Any) -> GraphCapture:
        """Run every launch once under stream capture; nothing executes on the pool's memory.

        Args:
            bound: its launches are captured in order.
            pool: a `_native.DiscoveryPool` that contains every Value and every allocation of an
                operator.

        Raises:
            CaptureError: a launch cannot be captured; the message names it.
            ExecutionError: the driver failed.
        """


def device_of(program: Program) -> int:
    """The GPU on which a Program was recorded, or to which its file was read."""
    return current_device() if program.device_index is None else program.device_index


def current_device() -> int:
    """The current GPU of torch; the first one if torch finds none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0

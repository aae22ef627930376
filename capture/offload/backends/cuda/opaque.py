"""Opaque launches on CUDA: a callable's device work beyond the recorded launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from offload.backends.captured.relocation.captures import GraphCapture, NodeKind
from offload.backends.cuda.capture import Capturer, device_of
from offload.backends.cuda.layouts import discovery_pool
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.interpreter.device_failures import torch_failures
from offload.program import BoundProgram

_MAXIMUM_TRIES = 3


class CudaOpaqueLauncher:
    """Captures a callable as one launch, like any other; see `OpaqueLauncher`."""

    def __init__(self, capturer: Capturer | None, require: Callable[[int], None]) -> None:
        """Serve one backend.

        Args:
            capturer: makes graphs of launches; None: torch's.
            require: raises if the device of an index is missing, or the caller is capturing.
        """
        self._capturer = capturer
        self._require = require

    @torch_failures("capturing the recorded call")
    def unseen_work(self, seen: BoundProgram, opaque: BoundProgram) -> tuple[str, ...]:
        """Capture both, and compare their kernels, copies and memsets.

        Libraries may choose other kernels in another capture: only what the callable launches
        beyond the Program each time counts as unseen. Copies that the capturer added are not work
        of either.

        Raises:
            BackendUnavailable: as `CudaBackend.machine`.
            CaptureError: one of the two cannot be captured, or the caller is capturing.
            ExecutionError: the driver failed.
        """
        device = device_of(seen.program)
        self._require(device)
        capturers = [self._capturer or TorchCapturer() for _ in range(2)]
        unseen: Counter[str] | None = None
        for attempt in range(_MAXIMUM_TRIES):
            of_seen, whole = (
                _node_names(capturer.capture(one, discovery_pool(seen.program, seed)))
                for seed, capturer, one in zip(
                    (2 * attempt, 2 * attempt + 1), capturers, (seen, opaque), strict=True
                )
            )
            surplus = whole - of_seen
            unseen = surplus if unseen is None else unseen & surplus
            if not unseen:
                return ()
        assert unseen is not None
        return tuple(sorted(unseen.elements()))


def _node_names(capture: GraphCapture) -> Counter[str]:
    """The number of occurrences of each kernel, copy and memset of what was captured."""
    return Counter(
        node.name
        for index, node in enumerate(capture.nodes)
        if node.kind is not NodeKind.EMPTY and index not in capture.added
    )

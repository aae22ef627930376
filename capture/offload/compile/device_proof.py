"""Proof of kernels on a device against the launches that they replace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.compile.proof import compare, plain_torch, run
from offload.interpreter.eager_run import bytes_of
from offload.program import Program


class DeviceProof:
    """Proves the kernels of one launch, before the graph is captured.

    Attributes:
        name: of the launch, for messages.
        failure: why the proof failed; empty if it did not fail, or was not made yet.
    """

    def __init__(self, name: str, replaces: Program, sums: int) -> None:
        """Keep what a proof needs; arguments as of `KernelProof`."""
        self.name = name
        self.failure = ""
        self._replaces = replaces
        self._sums = sums

    def prove(self, given: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
        """Why the kernels differ from the replaced launches; empty if they do not.

        The device's current stream is used. The tolerance is that of `KernelProof`.

        Args:
            given: the inputs, each a whole Value.
            found: what the kernels made of them, likewise.

        Raises:
            Whatever the replaced launches raise.
        """
        with plain_torch():
            inputs = [bytes_of(one.untyped_storage()) for one in given]
            recorded = run(self._replaces, inputs)
            self.failure = compare(self._replaces, inputs, found, recorded, self._sums)
        return self.failure

"""Weights whose addresses are constants, so that they are written in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offload.backends.captured.opaque_weights import device_weights
from offload.backends.captured.relocation.captures import OwnedRange
from offload.backends.captured.relocation.contents import ComparedMemory, Stretch
from offload.program import BoundProgram, Value

WEIGHT_OWNER = "weight "
"""The owner of a weight's memory: this text, followed by its name."""


def weight_ranges(bound: BoundProgram) -> list[OwnedRange]:
    """The memory of an opaque Program's weights, which constant words may point into."""
    program = bound.program
    return [] if program.opaque is None else ranges_of(bound, device_weights(program))


def ranges_of(bound: BoundProgram, weights: Iterable[Value]) -> list[OwnedRange]:
    """The memory of some weights, in the model's tensors."""
    return [
        OwnedRange(storage.data_ptr(), storage.nbytes(), WEIGHT_OWNER + value.name)
        for value in weights
        for storage in [bound.bindings.weights[value.index][0].untyped_storage()]
    ]


class FixedWeights:
    """Copies of weights that executions may write in place, to restore them.

    Attributes:
        left: the state that the latest execution has left of each: copies, in blocks of this
            memory.
    """

    def __init__(
        self,
        bound: BoundProgram,
        memory: ComparedMemory,
        values: Sequence[Value],
        streamed: Mapping[int, int],
    ) -> None:
        """Copy the weights `values` of the Program, those in `streamed` from the address there."""
        self.left: list[Stretch] = []
        self._memory = memory
        self._kept: list[tuple[int, int, int]] = []
        for value in values:
            original = (
                streamed[value.index]
                if value.index in streamed
                else bound.bindings.weights[value.index][0].untyped_storage().data_ptr()
            )
            copy, left = (memory.allocate(value.size_bytes) for _ in range(2))
            memory.copy(copy, original, value.size_bytes)
            self._kept.append((original, copy, value.size_bytes))
            name = f"{value.name} ({value.index})"
            self.left.append(Stretch(name, left, value.size_bytes, value.dtype))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Execute in the block: the weights' new state is copied, then undone, also on failure."""
        try:
            yield
            for (original, _, size_bytes), left in zip(self._kept, self.left, strict=True):
                self._memory.copy(left.address, original, size_bytes)
        except BaseException:
            with contextlib.suppress(Exception):  # from a device that has failed
                self._put_back()
            raise
        self._put_back()

    def _put_back(self) -> None:
        for original, copy, size_bytes in self._kept:
            self._memory.copy(original, copy, size_bytes)

    def free(self) -> None:
        """Free the copies."""
        for (_, copy, _), left in zip(self._kept, self.left, strict=True):
            self._memory.free(copy)
            self._memory.free(left.address)
        self._kept.clear()
        self.left.clear()

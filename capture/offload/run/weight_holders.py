"""Which ranks hold the present content of weights that stages of a training step write.

A rank of a training step in stages writes the weights of its own stage, and keeps old content of
all others until `gather_state`. Each process knows the division of the steps that it takes part in,
so that all ranks come to the same decision without a message.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping

from torch.multiprocessing.reductions import StorageWeakRef

from offload.errors import BindingError
from offload.program import BoundProgram

Ranks = frozenset[int]
"""Ranks of the world."""


class WeightHolders:
    """By weight the ranks that hold its present content, where these are not all ranks.

    Weights are weak references to their storages: equal references are to one storage, whose
    address is not used again while there is a reference.

    Owner: the process. Thread: any.

    Attributes:
        generation: changes with every change.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._holders: dict[StorageWeakRef, Ranks] = {}

    def of(self, weight: StorageWeakRef) -> Ranks | None:
        """The ranks that hold the content of a weight; None: all do."""
        return self._holders.get(weight)

    def write(self, written: Mapping[StorageWeakRef, Ranks]) -> None:
        """Note that only these ranks write these weights."""
        with self._lock:
            changed = {one: ranks for one, ranks in written.items() if self.of(one) != ranks}
            if changed:
                kept = {one: held for one, held in self._holders.items() if not one.expired()}
                self._holders = kept | changed
                self.generation += 1

    def gather(self, weights: Collection[StorageWeakRef]) -> None:
        """Note that all ranks hold the content of these weights."""
        with self._lock:
            self._holders = {one: held for one, held in self._holders.items() if one not in weights}
            self.generation += 1


WEIGHT_HOLDERS = WeightHolders()
"""Those of this process."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageWeights:
    """The weights of a Program in stages, by their numbers.

    Attributes:
        used: by weight the ranks whose stages use their own memory of it.
        written: by weight the ranks whose stages write it; these are among those that use it.
    """

    used: Mapping[int, Ranks]
    written: Mapping[int, Ranks]


class HeldWeights:
    """The weights of one executable in stages, which it does not keep alive.

    Owner: the executable. Thread: one at a time.
    """

    def __init__(self, whole: BoundProgram, of_stages: StageWeights) -> None:
        held = {weight: weak_weight(whole, weight) for weight in of_stages.used}
        self._used = [
            (held[weight], ranks, whole.program.values[weight].name)
            for weight, ranks in of_stages.used.items()
        ]
        self._written = {held[weight]: ranks for weight, ranks in of_stages.written.items()}
        self._generation: int | None = None  # in which they were looked at

    def begin_call(self) -> None:
        """Check that each stage holds what it uses, and note what the call writes.

        Raises:
            BindingError: a rank holds old content of a weight that its stage uses; on all ranks.
        """
        if self._generation == WEIGHT_HOLDERS.generation:
            return
        for weight, ranks, name in self._used:
            holders = WEIGHT_HOLDERS.of(weight)
            if holders is not None and not ranks <= holders:
                raise BindingError(
                    f"{name}: rank {min(ranks - holders)} holds old content, as another executable "
                    f"in stages writes it on rank {min(holders)}: call its gather_state() on all "
                    "ranks first, or load both with the same stages (Pipeline(begins=...))"
                )
        WEIGHT_HOLDERS.write(self._written)
        self._generation = WEIGHT_HOLDERS.generation


def weak_weight(whole: BoundProgram, weight: int) -> StorageWeakRef:
    """A weight of a Program, by reference to the storage that its tensors have now."""
    return StorageWeakRef(whole.bindings.weights[weight][0].untyped_storage())

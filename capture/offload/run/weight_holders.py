"""Which ranks hold the present content of weights that stages of a training step write.

A rank of a training step in stages writes the weights of its own stage, and keeps old content of
all others until `gather_state`. Each process knows the division of the steps that it takes part in,
so that all ranks come to the same decision without a message.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.errors import BindingError
from offload.program import BoundProgram

Ranks = frozenset[int]
"""Ranks of the world."""


class WeightHolders:
    """By weight the ranks that hold its present content, where these are not all ranks.

    Owner: the process. Thread: any.

    Attributes:
        generation: changes with every change.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        # By the storage's address, which is not used again while there is a weak reference to it.
        self._holders: dict[int, tuple[StorageWeakRef, Ranks]] = {}

    def of(self, storage: torch.UntypedStorage) -> Ranks | None:
        """The ranks that hold the content of a weight; None: all do."""
        found = self._holders.get(storage._cdata)
        return None if found is None else found[1]

    def write(self, written: Iterable[tuple[torch.UntypedStorage, Ranks]]) -> None:
        """Note that only these ranks write these weights."""
        with self._lock:
            changed = [(one, ranks) for one, ranks in written if self.of(one) != ranks]
            if not changed:
                return
            self.generation += 1
            self._holders = {
                key: held for key, held in self._holders.items() if not held[0].expired()
            }
            for storage, ranks in changed:
                self._holders[storage._cdata] = StorageWeakRef(storage), ranks

    def gather(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note that all ranks hold the content of these weights."""
        with self._lock:
            self.generation += 1
            for storage in storages:
                self._holders.pop(storage._cdata, None)


WEIGHT_HOLDERS = WeightHolders()
"""Those of this process."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageWeights:
    """The weights of a Program in stages, by their numbers.

    Attributes:
        used: by weight the ranks whose stages use their own memory of it.
        written: by weight the ranks whose stages write it.
    """

    used: Mapping[int, Ranks]
    written: Mapping[int, Ranks]


class HeldWeights:
    """The weights of one executable in stages. Owner: the executable. Thread: one at a time."""

    def __init__(self, whole: BoundProgram, of_stages: StageWeights) -> None:
        self._whole, self._of_stages = whole, of_stages
        self._generation: int | None = None  # in which they were looked at

    def begin_call(self) -> None:
        """Check that each stage holds what it uses, and note what the call writes.

        Raises:
            BindingError: a rank holds old content of a weight that its stage uses; on all ranks.
        """
        if self._generation == WEIGHT_HOLDERS.generation:
            return
        for weight, ranks in self._of_stages.used.items():
            holders = WEIGHT_HOLDERS.of(self.storage(weight))
            if holders is not None and not ranks <= holders:
                raise BindingError(
                    f"{self._whole.program.values[weight].name}: rank {min(ranks - holders)} holds "
                    "old content, as another executable in stages writes it on rank "
                    f"{min(holders)}: call its gather_state() on all ranks first, or load both "
                    "with the same stages (Pipeline(begins=...))"
                )
        if self._of_stages.written:
            WEIGHT_HOLDERS.write(
                (self.storage(weight), ranks) for weight, ranks in self._of_stages.written.items()
            )
        self._generation = WEIGHT_HOLDERS.generation

    def storage(self, weight: int) -> torch.UntypedStorage:
        """The memory of a weight of the whole Program."""
        return self._whole.bindings.weights[weight][0].untyped_storage()

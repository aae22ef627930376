"""Outcomes of random launches in the recorded call: for a check that draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from offload.interpreter.eager_run import EagerRun
from offload.program import Launch, TensorView
from offload.record.storages import TrackedStorage


@dataclasses.dataclass(frozen=True, slots=True)
class RandomOutcome:
    """The results and writes of one random launch, copied before anything else wrote there.

    Attributes:
        made: the memory of each result that is a new Value, in order.
        written: for each written tensor argument, its position among all and its content.
        written_whole: likewise for arguments that the operator wrote without declaring it: the
            bytes of the whole Value.
    """

    made: tuple[torch.UntypedStorage, ...]
    written: tuple[tuple[int, torch.Tensor], ...]
    written_whole: tuple[tuple[int, torch.Tensor], ...]

    @classmethod
    def observed(
        cls,
        results: Iterable[torch.Tensor],
        touched: Sequence[tuple[torch.Tensor, TrackedStorage, bool]],
        writes: Sequence[TrackedStorage],
    ) -> RandomOutcome:
        """Copy the outcome of a launch that has just run.

        Args:
            results: the tensors that are new Values.
            touched: each tensor argument of the launch, its storage, and whether the operator
                declares to write it.
            writes: the storages that it was observed to write.
        """
        declared = {tracked.value.index for _, tracked, is_write in touched if is_write}
        unsaid = {one.value.index: one for one in writes if one.value.index not in declared}
        written: list[tuple[int, torch.Tensor]] = []
        whole: list[tuple[int, torch.Tensor]] = []
        for position, (tensor, tracked, is_write) in enumerate(touched):
            if is_write:
                written.append((position, tensor.detach().clone()))
            elif (changed := unsaid.pop(tracked.value.index, None)) is not None:
                whole.append((position, changed.own_content().clone()))
        made = tuple(one.untyped_storage().clone() for one in results)
        return cls(made, tuple(written), tuple(whole))

    def put(self, launch: Launch, run: EagerRun, size_bytes: Sequence[int]) -> None:
        """Reproduce the recorded outcome in a run of the Program.

        Args:
            launch: the launch with this outcome.
            run: the holder of its tensors.
            size_bytes: the size of each Value of the Program.
        """
        for view, storage in zip(launch.made(), self.made, strict=True):
            run.bases[view.value] = (storage.clone(), 0)
        views = list(launch.views())
        for position, content in self.written:
            run.tensor(views[position]).copy_(content)
        for position, content in self.written_whole:
            value = views[position].value
            whole = TensorView(value, 0, (size_bytes[value],), (1,), "uint8")
            run.tensor(whole).copy_(content)


def by_launch(
    launches: Iterable[Launch], outcomes: Sequence[RandomOutcome]
) -> dict[int, RandomOutcome]:
    """Outcomes of random launches by index; no pass drops or reorders these launches."""
    random = [launch.index for launch in launches if launch.random]
    return dict(zip(random, outcomes, strict=True))

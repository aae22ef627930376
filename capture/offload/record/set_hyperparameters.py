"""Hyperparameters that a step sets, such as a learning rate that is its argument.

A step may write a tensor in `param_groups` in place, or put another tensor there. Both repeat in a
replay if the content comes from tensors that the call is given or computes: a replay computes them
again. What comes from Python numbers would stay that of the recorded step, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from offload.errors import CaptureError
from offload.program import Role

if TYPE_CHECKING:
    from offload.record.launches import LaunchRecorder
    from offload.record.trained_parts import Group

_REMEDY = (
    "do it between the calls, in eager, or copy it from a tensor that is an argument of the step, "
    "on the parameters' device (group['lr'].copy_(lr))"
)


def refuse_written_numbers(groups: Sequence[Group], log: LaunchRecorder) -> None:
    """Refuse writes in place to hyperparameters of numbers that each replay would repeat.

    Args:
        groups: the groups before the call.
        log: the call's launches.

    Raises:
        CaptureError: there is one.
    """
    by_index = {tracked.value.index: tracked for tracked in log.table}
    for group in groups:
        for key, item in group.values.items():
            tracked = log.table.find(item) if isinstance(item, torch.Tensor) else None
            if tracked is None or not tracked.written:
                continue
            index = tracked.value.index
            for launch in log.launches:
                others = {view.value for view in launch.views()} - {index}
                if index in launch.writes and all(by_index[one].known for one in others):
                    raise CaptureError(
                        f"{launch.source}: the call writes {group.place(key)} from numbers that "
                        "are constant in a replay, as a scheduler does, and a replay would not "
                        f"compute them again: {_REMEDY}"
                    )


def assigned_tensors(before: Group, now: Group, log: LaunchRecorder) -> dict[str, torch.Tensor]:
    """The tensors that the call put in the place of other hyperparameters, by key.

    Args:
        before: a group before the call.
        now: the same group now.
        log: the call's launches.

    Returns:
        Those that launches used and that are not constant.
    """
    found = {}
    for key, item in now.values.items():
        if isinstance(item, torch.Tensor) and before.values.get(key) is not item:
            tracked = log.table.find(item)
            if tracked is not None and not tracked.known:
                found[key] = item
    return found


def first_assigned(before: Group, now: Group, log: LaunchRecorder) -> Iterator[str]:
    """Yield the places where a later call finds another kind of object than this call did."""
    for key, item in assigned_tensors(before, now, log).items():
        is_held = log.table.of(item).value.role is Role.WEIGHT
        if is_held or not isinstance(before.values.get(key), torch.Tensor):
            yield now.place(key)


class KeptHyperparameters:
    """The tensors that hold what a step puts in the place of hyperparameters.

    Between steps these stay in their places, and launches write them: an execution leaves its own
    argument there no more than the recorded one. Groups that are given one tensor keep one.

    Owner: a TrainedState.
    """

    def __init__(self, log: LaunchRecorder) -> None:
        """Begin without tensors; copies are recorded in `log`."""
        self._log = log
        self._by_assigned: dict[int, torch.Tensor] = {}

    def keep(self, before: Group, now: Group) -> None:
        """Copy what the call assigned into tensors of their own, and put these in its place.

        Raises:
            CaptureError: the call also reads what was there before.
        """
        for key, item in assigned_tensors(before, now, self._log).items():
            old = before.values[key]
            if self._log.table.find(old) is not None:
                raise CaptureError(
                    f"the step reads {now.place(key)} and puts another tensor in its place, which "
                    "a replay would not find: write it in place instead (group['lr'].copy_(lr))"
                )
            if id(item) not in self._by_assigned:
                kept = torch.empty_like(item.detach())
                kept.copy_(item.detach())
                self._log.table.add_held(kept, now.place(key))
                self._log.recorded_copy(kept, item.detach())
                self._by_assigned[id(item)] = kept
            holder = now.stepped.optimizer.param_groups[now.at]
            holder[key] = self._by_assigned[id(item)]

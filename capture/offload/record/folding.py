"""What a call made of constants alone: kept with the weights, so that no launch has to make it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

import torch

from offload.program import Launch, Role, Value
from offload.record.storages import StorageTable, TrackedStorage
from offload.torch_names import find_dtype


def folded_values(table: StorageTable, returned: Set[int]) -> Set[int]:
    """The Values that were made of constants alone, nobody writes, and the call does not return."""
    return {
        one.value.index for one in table if one.value.role is Role.ACTIVATION and one.constant
    } - returned


def is_folded(launch: Launch, folded: Set[int]) -> bool:
    """Whether all that a launch does is to make constants, which are kept as weights."""
    made = {view.value for view in launch.made()}
    return bool(made) and made <= folded and set(launch.writes) == made


def final_values(
    table: StorageTable, returned: Set[int], folded: Set[int], launches: Iterable[Launch]
) -> tuple[Value, ...]:
    """All Values with the roles that the whole call gives them.

    Nobody can change what was folded on the host, so that of it only what launches use is kept.
    """
    used = {index for launch in launches for index in launch.reads}
    values = []
    for tracked in sorted(table, key=lambda one: one.value.index):
        value = tracked.value
        if value.index in folded and (value.index in used or not value.on_host):
            value = dataclasses.replace(value, role=Role.WEIGHT)
        elif value.role is Role.ACTIVATION and value.index in returned:
            value = dataclasses.replace(value, role=Role.OUTPUT)
        values.append(value)
    return tuple(values)


def holders_of(tracked: TrackedStorage) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a weight; for what was folded one on its storage."""
    if tracked.holders:
        return tracked.holders
    if not tracked.value.on_host:
        return (tracked.content(),)
    return (tracked.own_content().view(find_dtype(tracked.value.dtype)).reshape(()),)

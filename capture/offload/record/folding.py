"""What a call made of constants alone: kept with the weights, so that no launch has to make it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set

import torch

from offload.interpreter.torch_names import find_dtype
from offload.program import Launch, Role, Value
from offload.record.operators import Overload
from offload.record.storages import StorageTable, TrackedStorage

# What is made from constants alone is kept with the weights up to this size; above it, computing it
# again takes less memory.
FOLDED_BYTES = 1024 * 1024


def note_constants(
    operator: Overload,
    given: Sequence[TrackedStorage],
    writes: Sequence[TrackedStorage],
    made: Sequence[TrackedStorage],
    *,
    has_content: bool,
) -> None:
    """Mark what depends on constants alone, and of that what nobody has written since.

    Args:
        operator: that was launched.
        given: the storages of its arguments.
        writes: those of them that it wrote.
        made: the storages that it made.
        has_content: whether what it made holds anything where it is not on the host.
    """
    pure = operator.is_aten and not operator.random and not operator.reserves
    known = pure and all(one.known for one in given)
    folds = known and not writes and all(one.constant for one in given)
    for tracked in writes:
        tracked.constant = False
        tracked.known = tracked.known and known
    for tracked in made:
        tracked.known = known
        is_there = has_content or tracked.value.on_host
        is_small = tracked.value.size_bytes <= FOLDED_BYTES
        tracked.constant = folds and is_there and is_small


def folded_values(table: StorageTable, returned: Set[int], launches: Iterable[Launch]) -> Set[int]:
    """The Values that were made of constants alone, nobody writes, and the call does not return.

    Not what a launch makes that makes something else besides: that launch stays, and makes both.
    """
    folded = {
        one.value.index for one in table if one.value.role is Role.ACTIVATION and one.constant
    } - returned
    for launch in launches:
        if not is_folded(launch, folded):
            folded -= {view.value for view in launch.made()}
    return folded


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

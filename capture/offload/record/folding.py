"""Values that a call computes from constants alone: noted while recording, then kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.interpreter.torch_names import find_dtype
from offload.record.operators import Overload
from offload.record.storages import TrackedStorage


def note_constants(
    operator: Overload,
    given: Sequence[TrackedStorage],
    writes: Sequence[TrackedStorage],
    made: Sequence[TrackedStorage],
) -> bool:
    """Mark storages that depend on constants alone.

    Args:
        operator: the launched operator.
        given: the storages of its arguments.
        writes: those among them that it wrote.
        made: the storages that it made.

    Returns:
        Whether the launch always gives the same results, and writes none of its arguments.
    """
    pure = operator.is_aten and not operator.random and not operator.reserves
    known = pure and all(one.known for one in given)
    for tracked in writes:
        tracked.known = tracked.known and known
    for tracked in made:
        tracked.known = known
    return known and not writes


def holders_of(tracked: TrackedStorage) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a weight; for a folded value a tensor on its storage."""
    if tracked.holders:
        return tracked.holders
    if not tracked.value.on_host:
        return (tracked.content(),)
    return (tracked.own_content().view(find_dtype(tracked.value.dtype)).reshape(()),)

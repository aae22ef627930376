"""Parts of a training step that every rank can compute: which ranks run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.program.launch import EffectKind
from offload.program.step_parts import Part, StepParts, is_weight


def shared_parts(step: StepParts, stages: Sequence[int | None], n_stages: int) -> list[set[int]]:
    """By rank the positions of the shared parts that it runs.

    These are the parts on which its other launches depend, all guards, and writes of weights that
    no rank uses, which all ranks make.
    """
    shared = [at for at, stage in enumerate(stages) if stage is None]
    guards = [at for at in shared if _is_guard(step.parts[at])]
    found = [
        _closure(
            step,
            guards,
            {
                value
                for at, stage in enumerate(stages)
                if stage == rank
                for value in step.parts[at].launch.touched()
                if value in step.shared
            },
        )
        for rank in range(n_stages)
    ]
    unused = [
        at
        for at in shared
        if not any(at in one for one in found)
        and any(is_weight(step.program, one) for one in step.parts[at].launch.writes)
    ]
    if unused:
        more = _closure(step, unused, set())
        found = [one | more for one in found]
    return found


def _closure(step: StepParts, parts: Iterable[int], values: set[int]) -> set[int]:
    """Shared parts, and all shared parts on which they or these Values depend."""
    found = set(parts)
    needed = values.union(*(step.parts[at].launch.touched() for at in found))
    n_before = -1
    while len(found) != n_before:
        n_before = len(found)
        for at in reversed(range(len(step.parts))):
            part = step.parts[at]
            if part.is_shared and at not in found and not needed.isdisjoint(part.launch.writes):
                found.add(at)
                needed.update(part.launch.touched())
    return found


def guard_parts(step: StepParts) -> set[int]:
    """The positions of guards and of what they depend on.

    They run first, so that all ranks refuse alike.
    """
    found: set[int] = set()
    needed: set[int] = set()
    for at in reversed(range(len(step.parts))):
        part = step.parts[at]
        writes = set(part.launch.writes)
        if _is_guard(part) or (part.is_shared and not needed.isdisjoint(writes)):
            found.add(at)
            needed.update(part.launch.touched())
    return found


def _is_guard(part: Part) -> bool:
    return any(one.kind is EffectKind.GUARD for one in part.launch.effects)

"""Parts of a training step that every rank can compute: which ranks run them, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offload.plan.schedules import Pass
from offload.program.launch import EffectKind
from offload.program.step_draws import draws
from offload.program.step_parts import Part, StepParts, is_weight


def shared_parts(step: StepParts, stages: Sequence[int | None], n_stages: int) -> list[set[int]]:
    """By rank the positions of the shared parts that it runs.

    These are the parts on which its other launches depend, all guards, all parts that draw random
    numbers, and writes of weights that no rank uses, which all ranks make.
    """
    shared = [at for at, stage in enumerate(stages) if stage is None]
    everywhere = [at for at in shared if _is_guard(step.parts[at]) or draws(step.parts[at].launch)]
    found = [
        _closure(step, everywhere, [at for at, stage in enumerate(stages) if stage == rank])
        for rank in range(n_stages)
    ]
    unused = [
        at
        for at in shared
        if not any(at in one for one in found)
        and any(is_weight(step.program, one) for one in step.parts[at].launch.writes)
    ]
    if unused:
        more = _closure(step, unused, ())
        found = [one | more for one in found]
    return found


def _closure(step: StepParts, parts: Iterable[int], others: Iterable[int]) -> set[int]:
    """Shared parts, and all shared parts on which they, or other parts, depend.

    A tensor that the step makes is needed as it is at its use, a weight as the step leaves it.
    """
    found = set(parts)
    weights: set[int] = set()
    n_before = -1
    while len(found) + len(weights) != n_before:
        n_before = len(found) + len(weights)
        uses = found.union(others)
        needed: set[int] = set()  # behind the current part
        for at in reversed(range(len(step.parts))):
            part = step.parts[at]
            is_needed = part.is_shared and not (
                needed.isdisjoint(part.launch.writes) and weights.isdisjoint(part.launch.writes)
            )
            if is_needed:
                found.add(at)
            if is_needed or at in uses:
                touched = part.launch.touched()
                weights.update(value for value in touched if is_weight(step.program, value))
                needed.update(touched)
    return found


def guard_parts(step: StepParts) -> set[int]:
    """The positions of guards and of what they depend on.

    They run first, so that all ranks refuse the same executions.
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


def draw_positions(step: StepParts, passes: Mapping[Pass, int]) -> dict[int, int]:
    """By part that draws, or on which draws depend, its pass's position on a rank.

    A rank draws in recorded order: where its schedule has a pass earlier than a pass that was
    recorded before it, the draws of the latter move to the earlier pass.

    Args:
        step: the step.
        passes: by pass its position on the rank; the update is behind all.
    """
    found: dict[int, int] = {}
    needed: dict[int, int] = {}  # by Value that a draw reads, the position of that draw
    earliest = len(passes)
    for at in reversed(range(len(step.parts))):
        part = step.parts[at]
        if not part.is_shared:
            continue
        own = passes.get(Pass(part.phase, part.micro_batch), len(passes))
        uses = [needed[value] for value in part.launch.writes if value in needed]
        if draws(part.launch):
            uses.append(earliest)
        if not uses:
            continue
        found[at] = min(own, *uses)
        if draws(part.launch):
            earliest = found[at]
        for value in part.launch.touched():
            needed[value] = min(found[at], needed.get(value, found[at]))
    return found


def _is_guard(part: Part) -> bool:
    return any(one.kind is EffectKind.GUARD for one in part.launch.effects)

"""Checks an order of a Program's launches against the recorded order.

It shares no code with planners. Everything that launches touch (a Value, memory that inputs share,
an effect) has a version, which every write increments. In both orders each launch must find the
same version, and each writer must come after equally many readers of it. So each launch reads what
it read in the recorded order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

from offload.errors import PlanError
from offload.program import PLACED_ROLES, Effect, EffectKind, Launch, Program

_GUARD = Effect(EffectKind.GUARD)
_UNSEEN = Effect(EffectKind.UNSEEN)


def check_reordering(program: Program, order: Sequence[int]) -> None:
    """Prove that launches in another order have the same outcome as in the recorded order.

    Args:
        program: in recorded order.
        order: recorded indices in the order in which they run.

    Raises:
        PlanError: a launch is left out or run twice; a launch would find another content, or an
            effect in another order; or the start of a collective moved behind a wait that it
            preceded.
    """
    if sorted(order) != list(range(len(program.launches))):
        raise PlanError(f"expected each of {len(program.launches)} launches once in an order")
    found = _versions(program, range(len(program.launches)))
    for launch, versions in _versions(program, order).items():
        for what, version in versions.items():
            if found[launch][what] != version:
                raise PlanError(
                    f"launch {launch} ({program.launches[launch].name}) would find {what} after "
                    f"{version.n_writes} writes and {version.n_reads} reads, and was recorded "
                    f"after {found[launch][what].n_writes} and {found[launch][what].n_reads}"
                )
    _check_starts(program, order)


@dataclasses.dataclass(frozen=True, slots=True)
class _Version:
    """The version that a launch finds: writes before it, and for a writer, reads since these."""

    n_writes: int
    n_reads: int


def _versions(program: Program, order: Sequence[int]) -> dict[int, dict[Hashable, _Version]]:
    n_writes: dict[Hashable, int] = {}
    n_reads: dict[Hashable, int] = {}
    found: dict[int, dict[Hashable, _Version]] = {}
    names = _names(program)
    for index in order:
        versions = found[index] = {}
        for what, is_write in _touched(program, program.launches[index], names):
            reads = n_reads.get(what, 0)
            versions[what] = _Version(n_writes.get(what, 0), reads if is_write else 0)
            if is_write:
                n_writes[what] = n_writes.get(what, 0) + 1
                n_reads[what] = 0
            else:
                n_reads[what] = reads + 1
    return found


def _touched(
    program: Program, launch: Launch, names: Sequence[Hashable]
) -> Iterator[tuple[Hashable, bool]]:
    """Yield everything that a launch touches, once, and whether the launch writes it."""
    written = {names[value] for value in launch.writes}
    for what in dict.fromkeys(names[value] for value in (*launch.reads, *launch.writes)):
        yield what, what in written
    effects = launch.effects
    yield from ((effect, True) for effect in sorted(effects))
    if _UNSEEN not in effects:
        yield _UNSEEN, False
    is_seen = any(program.values[one].role not in PLACED_ROLES for one in launch.writes)
    if (is_seen or effects) and _GUARD not in effects:
        yield _GUARD, False


def _names(program: Program) -> list[Hashable]:
    """For each Value, a name of its memory, equal for inputs that share memory."""
    names: list[Hashable] = [f"%{value.index}" for value in program.values]
    for one in program.overlaps:
        first, second = (names[program.inputs[leaf].value] for leaf in (one.first, one.second))
        names = [first if name == second else name for name in names]
    return names


def _check_starts(program: Program, order: Sequence[int]) -> None:
    """Check that no start has moved behind a wait: ranks could wait for one another."""
    position = {launch: at for at, launch in enumerate(order)}
    starts = [one.index for one in program.launches if one.is_collective and not one.waits]
    waits = [one.index for one in program.launches if one.waits]
    for start in starts:
        for wait in waits:
            if start < wait and position[start] > position[wait]:
                raise PlanError(
                    f"launch {start} ({program.launches[start].name}) would start after launch "
                    f"{wait}, a wait that was recorded after it: ranks could wait for one another"
                )

"""Launches of a Program that must keep their order, on any number of lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload.program import PLACED_ROLES, Effect, EffectKind, Launch, Program

Conflict = tuple[int, int]
"""A launch and a later one that must not begin before it has ended."""

_GUARD = Effect(EffectKind.GUARD)
_UNSEEN = Effect(EffectKind.UNSEEN)


def launch_conflicts(program: Program) -> tuple[Conflict, ...]:
    """Pairs of launches that touch the same Value or effect, at least one writing.

    The first launch that touches a Value makes it. Inputs that share memory count as one. Unseen
    work keeps its order with everything, and a guard with state that callers can see and with other
    effects: an execution may end there, before any of that has changed. Pairs that others imply are
    mostly left out.
    """
    shared = _shared_inputs(program)
    found: set[Conflict] = set()
    writers: dict[object, int] = {}  # the last writer of each Value and effect
    readers: dict[object, list[int]] = {}  # since then
    for launch in program.launches:
        for what, is_write in _touches(program, launch, writers, shared):
            if what in writers:
                found.add((writers[what], launch.index))
            if is_write:
                found.update((reader, launch.index) for reader in readers.get(what, ()))
                writers[what] = launch.index
                readers[what] = []
            else:
                readers.setdefault(what, []).append(launch.index)
    return tuple(sorted(one for one in found if one[0] != one[1]))


def _touches(
    program: Program, launch: Launch, writers: dict[object, int], shared: Mapping[int, int]
) -> Iterator[tuple[object, bool]]:
    """Yield what a launch touches, and whether it writes it."""
    for value in dict.fromkeys((*launch.reads, *launch.writes)):
        is_made = program.values[value].role in PLACED_ROLES and value not in writers
        yield shared.get(value, value), value in launch.writes or is_made
    effects = launch.effects
    for effect in sorted(effects):
        yield effect, True
    if _UNSEEN not in effects:
        yield _UNSEEN, False
    is_seen = any(program.values[one].role not in PLACED_ROLES for one in launch.writes)
    if (is_seen or effects) and _GUARD not in effects:
        yield _GUARD, False


def _shared_inputs(program: Program) -> dict[int, int]:
    """By Value of an input that shares memory with others, their representative."""
    found: dict[int, int] = {}
    for one in program.overlaps:
        first, second = (
            found.get(value, value)
            for value in (program.inputs[leaf].value for leaf in (one.first, one.second))
        )
        for value in (first, second, *(each for each, root in found.items() if root == second)):
            found[value] = first
    return found

"""Removes launches whose results are unused."""

from __future__ import annotations

from offload.program import Launch, Program, Rewritten, Role, rewrite


def remove_dead_launches(program: Program) -> Rewritten:
    """Drop launches that no result and no input or weight depends on, and Values left unused.

    Launches with effects are always kept, and so are launches that write nothing (they are there
    for their check).
    """
    needed = {result.view.value for result in program.results}
    needed |= {v.index for v in program.values if v.role in (Role.INPUT, Role.WEIGHT)}
    alive: list[Launch] = []
    for launch in reversed(program.launches):
        if launch.effects or not launch.writes or needed.intersection(launch.writes):
            needed.update(launch.reads)
            needed.update(launch.writes)
            alive.append(launch)
    return rewrite(program, alive[::-1])

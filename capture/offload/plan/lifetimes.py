"""When each Value must exist."""

from __future__ import annotations

from offload.plan.plan import Lifetime
from offload.program import PLACED_ROLES, Program


def value_lifetimes(program: Program) -> tuple[Lifetime, ...]:
    """For each Value the launches between which it must exist, in recorded order.

    An activation lives from its first launch to after its last; inputs, weights and outputs live
    for the whole execution. A Value that no launch touches has an empty lifetime.
    """
    n_launches = len(program.launches)
    first = [n_launches] * len(program.values)
    last = [0] * len(program.values)
    for launch in program.launches:
        for index in (*launch.reads, *launch.writes):
            first[index] = min(first[index], launch.index)
            last[index] = max(last[index], launch.index + 1)
    return tuple(
        Lifetime(min(first[value.index], last[value.index]), last[value.index])
        if value.role in PLACED_ROLES
        else Lifetime(0, n_launches)
        for value in program.values
    )

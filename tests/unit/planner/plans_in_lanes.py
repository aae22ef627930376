"""Plans whose launches are in lanes that a test chooses, and their programs."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from small_programs import ACT, IN, OUT, WEIGHT, launch, program

from offload.errors import PlanError
from offload.plan import Plan
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait
from offload.program import Program


class InLanes(Plan):
    """Lanes that a test chooses, as no planner makes yet."""

    own: tuple[Lane, ...]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.own


def in_lanes(plan: Plan, *steps: list) -> Plan:
    fields = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan)}
    found = InLanes(**fields)
    object.__setattr__(found, "own", tuple(Lane(LaneKind.LAUNCHES, tuple(one)) for one in steps))
    return found


def is_right(check, one: Program, plan: Plan) -> bool:
    try:
        check(one, plan)
    except PlanError:
        return False
    return True


@st.composite
def programs(draw) -> Program:
    """Launches that each read one to three earlier Values and make one."""
    n_launches = draw(st.integers(1, 12))
    roles = [IN, WEIGHT, *[ACT] * (n_launches - 1), OUT]
    launches = []
    for index in range(n_launches):
        reads = draw(st.lists(st.integers(0, index + 1), min_size=1, max_size=3, unique=True))
        launches.append(launch(index, reads, index + 2))
    return program(roles, launches, n_launches + 1)


TOWERS = program(
    [IN, ACT, ACT, ACT, ACT, OUT],
    [
        launch(0, [0], 1),
        launch(1, [1], 2),
        launch(2, [0], 3),
        launch(3, [3], 4),
        launch(4, [2, 4], 5),
    ],
    5,
)
"""Two towers that are joined."""

JOINED = (
    [Run(0, 2), Wait(0), Run(4, 5), Record(1)],
    [Wait(1, age=1), Run(2, 4), Record(0)],
)

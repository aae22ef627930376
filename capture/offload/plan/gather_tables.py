"""Choices of tables to gather, and the floor that each leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.plan.repeated_copies import repeated_plans
from offload.plan.simulate_streaming import gather_ns
from offload.plan.streaming import Gather, WeightDemand, WeightUse
from offload.plan.streaming_floor import floor_plan
from offload.plan.topology import Link
from offload.plan.whole_weights import SMALLEST_STREAMED_BYTES, WholeWeights

LEAST_TABLE_OVER_ROWS = 4
"""A table may be gathered if it is this many times as large as the rows that a pass reads.

Each row costs the link's overhead, which a transfer of the table costs once; and a table that is
not much larger than a pass's rows does not justify reading them again in each pass.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Gathered tables, and the rest, which is placed and copied.

    Attributes:
        demand: all weights, and the durations of launches with all of them resident.
        rest: the weights that are not gathered, and the durations of launches with gathering.
        gathers: by table, in the order of the demand.
        floor: the least memory of the rest if each weight is copied once in a pass.
        repeated: plans in which some weights are copied more than once.
    """

    demand: WeightDemand
    rest: WeightDemand
    gathers: tuple[Gather, ...]
    floor: WholeWeights
    repeated: tuple[WholeWeights, ...]

    @property
    def least(self) -> WholeWeights:
        """The plan with the least memory; among equals, the quickest."""
        return min(
            (self.floor, *self.repeated),
            key=lambda one: (one.required_bytes, one.layout.period_ns),
        )


def may_be_gathered(weight: WeightUse) -> bool:
    """Whether a weight is a table of which a pass reads sufficiently few rows."""
    return (
        weight.row_bytes > 0
        and not weight.stays
        and weight.size_bytes >= SMALLEST_STREAMED_BYTES
        and weight.size_bytes >= LEAST_TABLE_OVER_ROWS * weight.rows_bytes
    )


def gather_choices(demand: WeightDemand, link: Link, alignment_bytes: int) -> list[Choice]:
    """The choices: no table, then those that save most memory, doubling in number up to all.

    Raises:
        PlanError: the sizes add up to 2^63 bytes or more.
    """
    tables = [one for one in demand.weights if may_be_gathered(one)]
    tables.sort(key=lambda one: one.rows_bytes - one.size_bytes)
    counts = [0]
    while counts[-1] < len(tables):
        counts.append(min(len(tables), max(1, 2 * counts[-1])))
    return [_choice(demand, tables[:n_tables], link, alignment_bytes) for n_tables in counts]


def _choice(
    demand: WeightDemand, tables: Sequence[WeightUse], link: Link, alignment_bytes: int
) -> Choice:
    values = {one.value for one in tables}
    gathers = tuple(
        Gather(weight.value, launch, n_rows, weight.row_bytes)
        for weight in demand.weights
        if weight.value in values
        for launch, n_rows in zip(weight.launches, weight.n_rows, strict=True)
    )
    launch_ns = list(demand.launch_ns)
    for one in gathers:
        launch_ns[one.launch] += gather_ns(one, link)
    rest = WeightDemand(
        tuple(launch_ns), tuple(one for one in demand.weights if one.value not in values)
    )
    floor = floor_plan(rest, link, alignment_bytes)
    return Choice(demand, rest, gathers, floor, repeated_plans(rest, link, alignment_bytes))

"""The order in which a Program needs its weights."""

from __future__ import annotations

from collections.abc import Sequence, Set

from offload.errors import PlanError
from offload.plan.row_reads import row_reads
from offload.plan.streaming import WeightDemand, WeightUse
from offload.program import Program, Role


def weight_demand(
    program: Program, launch_ns: Sequence[float], stored: Set[int] = frozenset()
) -> WeightDemand:
    """Collect the launches that read each weight.

    Args:
        program: gives launches and weights.
        launch_ns: the duration of each launch with all weights resident, from a warm-up or the cost
            table.
        stored: the weights in files; empty if all are in memory.

    Returns:
        An entry for each Value of role weight, in order. A weight must stay resident if a launch
        writes it, if no launch reads it, if the result shows it, or if it is in memory beside
        weights in files. Tables of which launches read only rows (`row_reads`) are marked.

    Raises:
        PlanError: the durations do not match the launches, or one is negative or not finite.
    """
    if len(launch_ns) != len(program.launches):
        raise PlanError(
            f"expected the times of {len(program.launches)} launches, got {len(launch_ns)}"
        )
    readers: dict[int, list[int]] = {value.index: [] for value in program.of_role(Role.WEIGHT)}
    stays = {result.view.value for result in program.results}
    if stored:
        stays.update(readers.keys() - stored)
    for launch in program.launches:
        for index in dict.fromkeys(launch.reads):
            if index in readers:
                readers[index].append(launch.index)
        stays.update(launch.writes)
    tables = row_reads(program)
    return WeightDemand(
        launch_ns=tuple(float(one) for one in launch_ns),
        weights=tuple(
            WeightUse(
                value=index,
                size_bytes=program.values[index].size_bytes,
                launches=tuple(launches),
                name=program.values[index].name,
                stays=index in stays or not launches,
                row_bytes=tables[index].row_bytes if index in tables else 0,
                n_rows=tables[index].n_rows if index in tables else (),
            )
            for index, launches in readers.items()
        ),
    )

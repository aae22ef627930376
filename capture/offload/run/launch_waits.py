"""What launches of an execution waited for weights, measured beside predicted."""

from __future__ import annotations

import dataclasses

from offload.plan import simulate_streaming
from offload.plan.streaming import Streaming, WeightDemand
from offload.program import Program
from offload.run.reports import LastExecution


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchWait:
    """One launch that waited, or was predicted to.

    Attributes:
        launch: its index in the program.
        operator: what it runs.
        measured_ns: of the execution.
        predicted_ns: of a pass once the first ones are over, by the plan's times of launches and
            the link.
    """

    launch: int
    operator: str
    measured_ns: int
    predicted_ns: float


def launch_waits(
    program: Program, plan: Streaming, execution: LastExecution
) -> tuple[LaunchWait, ...]:
    """The launches that waited for weights or should have, the longest measured waits first.

    Empty where the execution does not tell what its launches waited.
    """
    if execution.stream_waits is None:
        return ()
    measured = dict(execution.stream_waits)
    predicted = predicted_waits_ns(plan)
    found = [
        LaunchWait(
            launch.index,
            launch.name,
            measured.get(launch.index, 0),
            predicted[launch.index] if predicted else 0.0,
        )
        for launch in program.launches
    ]
    waited = [one for one in found if one.measured_ns or round(one.predicted_ns)]
    return tuple(sorted(waited, key=lambda one: (-one.measured_ns, -one.predicted_ns)))


def predicted_waits_ns(plan: Streaming) -> tuple[float, ...]:
    """For each launch what the plan's own simulation lets it wait; empty where it has no times."""
    if not plan.launch_ns:
        return ()
    demand = WeightDemand(plan.launch_ns, ())
    return simulate_streaming(demand, plan, plan.link).wait_ns


def beyond_launches_ns(plan: Streaming, pass_ns: int) -> float | None:
    """How much longer a pass took than its launches, timed one by one without any copy.

    That is what copies cost it where nobody can look inside; less than 0 where launches take longer
    one by one. None where the times of launches are estimates.
    """
    return None if plan.estimated or not plan.launch_ns else pass_ns - plan.compute_ns

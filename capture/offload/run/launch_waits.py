"""The waits of an execution's launches for weights, measured beside predicted."""

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
        operator: its operator.
        measured_ns: of the execution.
        predicted_ns: of a pass in the steady state, by the plan's times of launches and the link.
    """

    launch: int
    operator: str
    measured_ns: int
    predicted_ns: float


def launch_waits(
    program: Program, plan: Streaming, execution: LastExecution
) -> tuple[LaunchWait, ...]:
    """Return the launches with measured or predicted waits, the longest measured waits first.

    Empty where the execution has no measured waits.
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
    """Return each launch's wait in the plan's own simulation; empty where the plan has no times."""
    if not plan.launch_ns:
        return ()
    demand = WeightDemand(plan.launch_ns, ())
    return simulate_streaming(demand, plan, plan.link).wait_ns


def beyond_launches_ns(plan: Streaming, pass_ns: int) -> float | None:
    """Return the excess of a pass over its launches, timed one by one without any copy.

    This is the cost of copies on devices that measure only the whole pass; negative where launches
    take longer one by one. None where the times of launches are estimates.
    """
    return None if plan.estimated or not plan.launch_ns else pass_ns - plan.compute_ns

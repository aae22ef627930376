"""What simulated devices are said to take, so that every run decides alike."""

from __future__ import annotations

from offload.backends.base import Prepared, TimedLaunches
from offload.backends.captured.device_streaming import refuse_unstored
from offload.plan import Plan
from offload.plan.topology import Link
from offload.program import BoundProgram


class MadeUpLink:
    """Of a device's weights, over a link that is not measured."""

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """A copy takes about as long as what it hides behind."""
        refuse_unstored(bound)
        return Link(bytes_per_second=1e10, overhead_ns=1000.0)


class MadeUpTimes:
    """Of launches, not measured either."""

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """A microsecond each."""
        return TimedLaunches((1000.0,) * len(prepared.program.launches), "made up")

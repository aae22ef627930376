"""Predicts executions: header, launches and their delivery, on one machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from offload.costs.header_model import HeaderModel, HeaderShape
from offload.costs.signature import signature_of
from offload.errors import CostModelError
from offload.program import Launch, Program
from offload.timeline import ExecutionTimeline, Scheduling, SpanKind

_MOST_LAUNCHES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of one machine, device and version.

    Attributes:
        header: of m_l_t.
        issue_ns: delivery of one launch by the host (host scheduling).
        handoff_ns: from the delivery of a launch to its start on an idle device.
        launch_ns: device time of a launch, by signature.
    """

    header: HeaderModel
    issue_ns: float
    handoff_ns: float
    launch_ns: Mapping[str, float]

    def learned(self, program: Program, executions: Iterable[ExecutionTimeline]) -> CostModel:
        """This model, extended by launch durations measured in a timeline of the program."""
        return self._taking(
            (program.launches[span.launch], span.duration_ns)
            for execution in executions
            for span in execution.of_kind(SpanKind.LAUNCH)
        )

    def timed(self, program: Program, launch_ns: Iterable[float]) -> CostModel:
        """This model, extended by the device's durations of the program's launches, in order."""
        return self._taking(zip(program.launches, launch_ns, strict=True))

    def _taking(self, times: Iterable[tuple[Launch, float]]) -> CostModel:
        durations: dict[str, list[float]] = {}
        for launch, duration_ns in times:
            durations.setdefault(signature_of(launch), []).append(duration_ns)
        known = {signature: statistics.median(found) for signature, found in durations.items()}
        return dataclasses.replace(self, launch_ns={**self.launch_ns, **known})

    def keeping(self, launch_ns: Mapping[str, float]) -> CostModel:
        """This model, extended by these launch durations."""
        return dataclasses.replace(self, launch_ns={**self.launch_ns, **launch_ns})

    def durations_ns(self, program: Program) -> list[float]:
        """The predicted device time of each launch.

        Raises:
            CostModelError: a launch of its signature was never measured on this machine.
        """
        durations = []
        for launch in program.launches:
            signature = signature_of(launch)
            if signature not in self.launch_ns:
                raise CostModelError(
                    f"{signature} was never measured on this machine: record a timeline of the "
                    "program and learn from it (model.learned(program, timeline.executions))"
                )
            durations.append(self.launch_ns[signature])
        return durations

    def predict(self, program: Program, shape: HeaderShape, scheduling: Scheduling) -> Prediction:
        """Predict one execution.

        Raises:
            CostModelError: a launch of the program was never measured on this machine.
        """
        return self.predict_launches(self.durations_ns(program), shape, scheduling)

    def predict_launches(
        self, durations_ns: Sequence[float], shape: HeaderShape, scheduling: Scheduling
    ) -> Prediction:
        """The same for launches with these device times."""
        stages_ns = self.header.stages_ns(shape)
        if scheduling is not Scheduling.OFFLOAD:
            stages_ns["submit"] = 0.0  # each launch is submitted separately: its issue
        at_ns = sum(stages_ns.values())
        low, high = self.header.interval_ratios()
        interval_ns = (low * at_ns, high * at_ns)
        if scheduling is Scheduling.OFFLOAD:
            return Prediction(stages_ns, (), _in_a_row(durations_ns, at_ns), interval_ns)
        issues, launches, free_ns = [], [], 0.0
        for duration_ns in durations_ns:
            issues.append((at_ns, at_ns + self.issue_ns))
            at_ns += self.issue_ns
            begin_ns = free_ns if free_ns > at_ns else at_ns + self.handoff_ns
            free_ns = begin_ns + duration_ns
            launches.append((begin_ns, free_ns))
        return Prediction(stages_ns, tuple(issues), tuple(launches), interval_ns)

    def break_even_launches(self, launch_ns: float, shape: HeaderShape) -> int | None:
        """The least number of launches of this device time for which offload is not slower.

        It is compared with delivery by the host. None if it is slower up to 2^20 launches.
        """

        def gain_ns(n_launches: int) -> float:
            times = [launch_ns] * n_launches
            offload, host = (
                self.predict_launches(times, shape, one).total_ns
                for one in (Scheduling.OFFLOAD, Scheduling.HOST)
            )
            return host - offload

        high = 1
        while gain_ns(high) < 0:
            high *= 2
            if high > _MOST_LAUNCHES:
                return None
        low = high // 2
        while high - low > 1:  # the gain grows with every launch
            middle = (low + high) // 2
            low, high = (low, middle) if gain_ns(middle) >= 0 else (middle, high)
        return high


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted execution, in ns since the caller's call.

    Attributes:
        stages_ns: the header's stages by name.
        issues, launches: begin and end of each, in order; no issues with offload scheduling.
        m_l_t_interval_ns: the interval of the header's duration, by `HeaderModel.interval_ratios`.
    """

    stages_ns: Mapping[str, float]
    issues: tuple[tuple[float, float], ...]
    launches: tuple[tuple[float, float], ...]
    m_l_t_interval_ns: tuple[float, float]

    @property
    def m_l_t_ns(self) -> float:
        """The header's duration."""
        return sum(self.stages_ns.values())

    @property
    def total_ns(self) -> float:
        """T_offload or T_host: until the end of the last launch."""
        return self.launches[-1][1] if self.launches else self.m_l_t_ns


def _in_a_row(durations_ns: Sequence[float], begin_ns: float) -> tuple[tuple[float, float], ...]:
    spans = []
    for duration_ns in durations_ns:
        spans.append((begin_ns, begin_ns + duration_ns))
        begin_ns += duration_ns
    return tuple(spans)


def delivery_costs_ns(executions: Iterable[ExecutionTimeline]) -> tuple[float, float]:
    """The issue and the hand-off of a launch, from host-scheduled executions.

    Raises:
        CostModelError: no launch was delivered by the host.
    """
    issues, handoffs = [], []
    for execution in executions:
        launches = {span.launch: span for span in execution.of_kind(SpanKind.LAUNCH)}
        free_ns = 0
        for issue in execution.of_kind(SpanKind.ISSUE):
            launch = launches[issue.launch]
            issues.append(issue.duration_ns)
            if free_ns < issue.end_ns:  # the device was idle, so the launch began at once
                handoffs.append(launch.begin_ns - issue.end_ns)
            free_ns = launch.end_ns
    if not issues:
        raise CostModelError("no launch was delivered by the host: load with scheduling='host'")
    handoff_ns = statistics.median(handoffs) if handoffs else 0.0
    return statistics.median(issues), max(0.0, handoff_ns)

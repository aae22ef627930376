"""The report on an executable: its size, and the costs of its executions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from offload.console.amounts import show_bytes
from offload.observe.timelines.summary import merged_names, microseconds
from offload.run import Executable, LastExecution, MemoryReport
from offload.run.launch_waits import (
    LaunchWait,
    beyond_launches_ns,
    launch_waits,
    predicted_waits_ns,
)

_SHOWN_WAITS = 5
_STAGES = ("convert", "drain", "policy", "patch", "submit")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """An executable and some executions of it.

    Attributes:
        n_launches: of its program.
        memory: its memory by kind.
        n_executions: the number of executions in the medians.
        stages_ns: the median of each stage of m_l_t, by name.
        substages_ns: the same for the substages of submit, on a device that reports them; an
            execution counts as 0 ns for a substage without work.
        m_l_t_ns: the median header duration.
        last: the latest execution.
        streaming: of weights under a budget; None if no weight is streamed.
    """

    n_launches: int
    memory: MemoryReport
    n_executions: int
    stages_ns: dict[str, int]
    m_l_t_ns: int
    last: LastExecution
    substages_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    streaming: StreamingReport | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StreamingReport:
    """How an executable's weights are streamed, and the cost for its executions.

    Attributes:
        budget_bytes, memory_bytes: device memory that weights may use, and that they use.
        streamed_bytes: copied for each execution.
        n_measured: the number of executions in the following medians: those whose device clock was
            read (see `LastExecution`). A figure is None if it is known for no execution.
        bytes_per_second: the rate of transfers, while they ran.
        wait_ns: the time that an execution's launches waited for weights.
        predicted_wait_ns: the same as planned.
        beyond_launches_ns: if wait_ns is unknown, the duration of executions beyond that of their
            launches, timed one by one without copies; None also if these are estimates.
        predicted_ns: of an execution's launches and waits.
        measured_ns: the same.
        waits: by launch, measured and predicted, of the latest execution that has them, the longest
            first.
        store_bytes, shared_store_bytes: host memory from which the device copies, and the part that
            other executables share; None if files are read.
    """

    budget_bytes: int
    memory_bytes: int
    streamed_bytes: int
    n_measured: int
    bytes_per_second: float | None
    wait_ns: int | None
    predicted_wait_ns: float
    beyond_launches_ns: float | None
    predicted_ns: float
    measured_ns: int | None
    waits: tuple[LaunchWait, ...] = ()
    store_bytes: int | None = None
    shared_store_bytes: int | None = None


def report_on(executable: Executable, executions: Sequence[LastExecution]) -> Report:
    """Summarise one or more executions of an executable."""
    return Report(
        n_launches=len(executable.program.launches),
        memory=executable.memory_report(),
        n_executions=len(executions),
        stages_ns={
            stage: _median(getattr(one, f"{stage}_ns") for one in executions) for stage in _STAGES
        },
        m_l_t_ns=_median(one.m_l_t_ns for one in executions),
        last=executions[-1],
        substages_ns={
            name: _median(one.substages_ns.get(name, 0) for one in executions)
            for name in merged_names(one.substages_ns for one in executions)
        },
        streaming=_streaming_report(executable, executions),
    )


def _streaming_report(
    executable: Executable, executions: Sequence[LastExecution]
) -> StreamingReport | None:
    streaming = executable.streaming
    if streaming is None or streaming.plan.is_resident:
        return None
    plan = streaming.plan
    rates = [one.stream_bytes_per_second for one in executions]
    waits_ns = [one.stream_wait_ns for one in executions]
    measured_ns = _known_median(one.pass_ns for one in executions)
    wait_ns = _known_median(waits_ns)
    measured = [one for one in executions if one.stream_waits is not None]
    return StreamingReport(
        budget_bytes=plan.budget_bytes,
        memory_bytes=plan.taken_bytes,
        streamed_bytes=plan.streamed_bytes,
        n_measured=sum(one.pass_ns is not None for one in executions),
        bytes_per_second=_known_median(rates),
        wait_ns=None if wait_ns is None else round(wait_ns),
        predicted_wait_ns=sum(predicted_waits_ns(plan)),
        beyond_launches_ns=beyond_launches_ns(plan, round(measured_ns))
        if measured_ns is not None and wait_ns is None
        else None,
        predicted_ns=plan.period_ns,
        measured_ns=None if measured_ns is None else round(measured_ns),
        waits=launch_waits(executable.program, plan, measured[-1]) if measured else (),
        store_bytes=streaming.store_bytes,
        shared_store_bytes=streaming.shared_store_bytes,
    )


def _known_median(samples: Iterable[float | None]) -> float | None:
    known = [one for one in samples if one is not None]
    return statistics.median(known) if known else None


def _median(samples: Iterable[int]) -> int:
    return round(statistics.median(samples))


def report_table(report: Report) -> Table:
    """The report as a table of two columns."""
    memory, last, streaming = report.memory, report.last, report.streaming
    outside = memory.outside_bytes
    rows = [
        ("launches", f"{report.n_launches:,}"),
        ("feature map", f"{memory.feature_map_bytes:,} bytes"),
        ("  without reuse", f"{memory.unshared_bytes:,} bytes"),
        ("  lower bound", f"{memory.lower_bound_bytes:,} bytes"),
        ("outside the arena", "not counted yet" if outside is None else f"{outside:,} bytes"),
        ("buffers of copied slots", f"{memory.buffer_bytes:,} bytes"),
        ("weights" if streaming else "weights, by reference", f"{memory.weight_bytes:,} bytes"),
        *(_streaming_rows(streaming) if streaming else ()),
        (f"m_l_t, median of {report.n_executions}", microseconds(report.m_l_t_ns)),
        *((f"  {stage}", microseconds(time)) for stage, time in report.stages_ns.items()),
        *((f"    {name}", microseconds(time)) for name, time in report.substages_ns.items()),
        ("last execution: policy", last.policy),
        ("  slots changed", f"{last.slots_changed:,}"),
        ("  words patched", f"{last.words_patched:,}"),
        ("  bytes copied", f"{last.bytes_copied:,}"),
    ]
    table = Table(title="Report", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, figure in rows:
        table.add_row(name, figure)
    return table


def _streaming_rows(streaming: StreamingReport) -> Iterator[tuple[str, str]]:
    yield "  budget", f"{streaming.budget_bytes:,} bytes"
    yield "  memory used of it", f"{streaming.memory_bytes:,} bytes"
    yield "  streamed by an execution", f"{streaming.streamed_bytes:,} bytes"
    if streaming.store_bytes is not None:
        yield "  in the host's memory", f"{streaming.store_bytes:,} bytes"
        yield "    shared with others", f"{streaming.shared_store_bytes or 0:,} bytes"
    if streaming.bytes_per_second is not None:
        yield "  streamed at", f"{show_bytes(streaming.bytes_per_second)}/s"
    if streaming.wait_ns is not None:
        yield "  launches waited", microseconds(streaming.wait_ns)
        yield "  launches waited, predicted", microseconds(streaming.predicted_wait_ns)
    if streaming.beyond_launches_ns is not None:
        yield "  longer than launches alone", microseconds(streaming.beyond_launches_ns)
    for one in streaming.waits[:_SHOWN_WAITS]:
        yield (
            f"  launch {one.launch} {one.operator} waited (predicted)",
            f"{microseconds(one.measured_ns)} ({microseconds(one.predicted_ns)})",
        )
    yield "  execution, predicted", microseconds(streaming.predicted_ns)
    if streaming.measured_ns is not None:
        yield "  execution, measured", microseconds(streaming.measured_ns)

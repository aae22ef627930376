"""A Diagnosis as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from offload.console.text import plain
from offload.observe.diagnosis.evidence import Finding
from offload.observe.diagnosis.idle import LaneIdle
from offload.observe.diagnosis.operators import OperatorCosts
from offload.observe.diagnosis.stopwatch import Timing, quartiles
from offload.observe.timelines.summary import microseconds

if TYPE_CHECKING:
    from offload.observe.diagnosis.diagnosis import Diagnosis, TraceFigures

_N_OPERATORS = 5


def diagnosis_tables(diagnosis: Diagnosis) -> Iterator[Text | Table]:
    """The evidence, then the most expensive operators; titles are separate texts.

    A table's own title would be broken at the table's width.
    """
    yield Text("\nEvidence")
    yield _evidence_table(diagnosis)
    if diagnosis.trace is not None:
        yield Text("\nThe device, from the first work to the last")
        yield _idle_table(diagnosis.trace)
        yield Text(_launch_text(diagnosis.trace))
        if diagnosis.trace.operators:
            yield Text("\nOperators by time on the host under the profiler, not the model's own")
            yield _profiled_table(diagnosis.trace)
    costs = diagnosis.operators
    if costs is not None and costs.operators:
        n_shown = min(len(costs.operators), _N_OPERATORS)
        yield Text(
            f"\nOperators that cost the host most ({n_shown} of {costs.n_signatures} signatures)"
        )
        yield _operator_table(costs)


def _table(*columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table()
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    return table


def _evidence_table(diagnosis: Diagnosis) -> Table:
    table = Table(show_header=False)
    for finding in diagnosis.findings:
        table.add_row(f"{finding.test} test", plain(_finding_text(finding)))
    for one in diagnosis.not_applied:
        table.add_row(f"{one.test} test", plain(f"not applied: {one.reason}"))
    for named in diagnosis.timings:
        table.add_row(named.name, _timing_text(named.timing))
    if diagnosis.n_launches is not None:
        table.add_row("launches", f"{diagnosis.n_launches:,}")
    if diagnosis.operators is not None:
        for reason in diagnosis.operators.untimed:
            table.add_row("not timed", plain(reason))
    for note in diagnosis.notes:
        table.add_row("note", plain(note))
    return table


def _finding_text(finding: Finding) -> str:
    limits = finding.thresholds
    samples = "" if finding.profiled else f", quartiles {finding.lower:.2f} to {finding.upper:.2f}"
    return (
        f"{finding.measure} = {finding.fraction:.2f}{samples}: {finding.verdict} "
        f"(host-bound from {limits.host}, device-bound up to {limits.device})"
        f"{'; under a profiler' if finding.profiled else ''}"
    )


def _timing_text(timing: Timing) -> str:
    lower, median, upper = (microseconds(round(one)) for one in quartiles(timing.samples_ns))
    return f"{median} ({lower} to {upper}, {len(timing.samples_ns)} samples)"


def _idle_table(trace: TraceFigures) -> Table:
    table = _table("lane", "work", "span", "busy", "host wait", "kernel wait", "other")
    for lane in (trace.idle.whole, *trace.idle.lanes):
        table.add_row(*_lane_cells(lane))
    return table


def _launch_text(trace: TraceFigures) -> str:
    if trace.mean_launch_ns is None:
        return "no launch call is recorded"
    return (
        f"{trace.n_short:,} of {trace.idle.whole.n_work:,} took less time than their launch call; "
        f"a launch call took {microseconds(round(trace.mean_launch_ns))} on average"
    )


def _lane_cells(lane: LaneIdle) -> tuple[str | Text, ...]:
    parts = (lane.busy_ns, lane.host_wait_ns, lane.kernel_wait_ns, lane.other_ns)
    shares = (f"{part / lane.span_ns:.1%}" if lane.span_ns else "-" for part in parts)
    return plain(lane.lane), f"{lane.n_work:,}", microseconds(lane.span_ns), *shares


def _profiled_table(trace: TraceFigures) -> Table:
    table = _table("operator", "calls", "self time")
    for one in trace.operators[:_N_OPERATORS]:
        table.add_row(plain(one.name), f"{one.n_calls:,}", microseconds(one.self_ns))
    return table


def _operator_table(costs: OperatorCosts) -> Table:
    shown = costs.operators[:_N_OPERATORS]
    if any(one.host_ns is None for one in shown):
        table = _table("operator", "launches", "eager", "eager, all")
    else:
        table = _table("operator", "launches", "eager", "device", "host", "host, all")
    for one in shown:
        device = (one.device_ns, one.host_ns) if one.host_ns is not None else ()
        times = (one.eager_ns, *device, one.total_ns)
        cells = (microseconds(round(time)) for time in times if time is not None)
        table.add_row(plain(one.signature), f"{one.n_launches:,}", *cells)
    return table

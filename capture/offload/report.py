"""What people are told about an executable: its report, and what is not as they may think."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from offload.backends import LaunchReport
from offload.program import Launch, Program, Role
from offload.replay import Executable, LastExecution, MemoryReport

_STAGES = ("convert", "policy", "patch", "submit")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """An executable and some executions of it.

    Attributes:
        n_launches: of its program.
        memory: its memory by kind.
        n_executions: how many the medians are over.
        stages_ns: of m_l_t the median of each stage, by name.
        m_l_t_ns: the median header duration.
        last: the latest execution.
    """

    n_launches: int
    memory: MemoryReport
    n_executions: int
    stages_ns: dict[str, int]
    m_l_t_ns: int
    last: LastExecution


def report_on(executable: Executable, executions: Sequence[LastExecution]) -> Report:
    """Sum up executions of an executable; at least one."""
    return Report(
        n_launches=len(executable.program.launches),
        memory=executable.memory_report(),
        n_executions=len(executions),
        stages_ns={
            stage: _median(getattr(one, f"{stage}_ns") for one in executions) for stage in _STAGES
        },
        m_l_t_ns=_median(one.m_l_t_ns for one in executions),
        last=executions[-1],
    )


def _median(samples: Iterable[int]) -> int:
    return round(statistics.median(samples))


def report_table(report: Report) -> Table:
    """The report as a table of two columns."""
    memory, last = report.memory, report.last
    outside = memory.outside_bytes
    rows = [
        ("launches", f"{report.n_launches:,}"),
        ("feature map", f"{memory.feature_map_bytes:,} bytes"),
        ("  without reuse", f"{memory.unshared_bytes:,} bytes"),
        ("  lower bound", f"{memory.lower_bound_bytes:,} bytes"),
        ("outside the arena", "not counted yet" if outside is None else f"{outside:,} bytes"),
        ("weights, by reference", f"{memory.weight_bytes:,} bytes"),
        (f"m_l_t, median of {report.n_executions}", microseconds(report.m_l_t_ns)),
        *((f"  {stage}", microseconds(time)) for stage, time in report.stages_ns.items()),
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


def microseconds(duration_ns: int) -> str:
    """A duration for people: `12.34 us`."""
    return f"{duration_ns / 1e3:,.2f} us"


# ---- explain ------------------------------------------------------------------------------------

_MODES = {
    "thunk": "write where the plan says, by a built-in call",
    "out": "write where the plan says, by their out-variant",
    "call": "run as recorded: in place, or into memory of their own",
    "copied": "run as recorded, then copy: their out-variant failed its proof",
    "unproved": "are proved at the first execution",
    "none": "compute nothing on this device",
}
_SEEN_MODES = ("call", "copied")


def explain(executable: Executable) -> str:
    """Say what a user should know about an executable, in a few lines of plain text.

    Which launches write straight into the feature map and which allocate, what is copied, what was
    read on the host, what is written and what is drawn. Complete after the first execution.
    """
    program, reports = executable.program, executable.launch_reports()
    recorded = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    lines = [f"{len(program.launches)} launches on {program.device}, recorded with {recorded}"]
    by_mode = collections.Counter(report.mode for report in reports)
    for mode, n_launches in by_mode.most_common():
        lines.append(f"{n_launches} launches {_MODES.get(mode, mode)}")
        if mode in _SEEN_MODES:
            lines += _operators_of(mode, program.launches, reports)
    lines += _memory_lines(executable)
    lines += _state_lines(program)
    lines += [f"host read, {note}" for note in program.host_reads]
    return "\n".join(lines)


def _operators_of(
    mode: str, launches: Sequence[Launch], reports: Sequence[LaunchReport]
) -> list[str]:
    """One line for each operator carried out in this way, the most frequent first."""
    found: dict[str, list[tuple[Launch, int]]] = {}
    for launch, report in zip(launches, reports, strict=True):
        if report.mode == mode:
            found.setdefault(launch.operator, []).append((launch, report.outside_bytes))
    return [
        f"  {operator}: {len(uses)}, {sum(size for _, size in uses):,} bytes outside the arena, "
        f"first at {uses[0][0].source}"
        for operator, uses in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def _memory_lines(executable: Executable) -> list[str]:
    memory, last = executable.memory_report(), executable.last_execution
    lines = [
        f"feature map {memory.feature_map_bytes:,} bytes (lower bound "
        f"{memory.lower_bound_bytes:,}, without reuse {memory.unshared_bytes:,})"
    ]
    if memory.outside_bytes is None:
        lines.append("bytes outside the arena are counted at the first execution")
    else:
        lines.append(
            f"{memory.outside_bytes:,} bytes outside the arena and {last.bytes_copied:,} bytes "
            "copied at the last execution"
        )
    return lines


def _state_lines(program: Program) -> list[str]:
    written = {index for launch in program.launches for index in launch.writes}
    lines = []
    for role in (Role.INPUT, Role.WEIGHT):
        names = [value.name for value in program.of_role(role) if value.index in written]
        if names:
            lines.append(f"writes {role}s: {', '.join(names)}")
    n_random = sum(launch.random for launch in program.launches)
    if n_random:
        lines.append(f"{n_random} launches draw random numbers, fresh at each execution")
    return lines

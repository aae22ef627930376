"""The report on an executable: how large it is, and what its executions cost."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from offload.replay import Executable, LastExecution, MemoryReport
from offload.timeline.summary import microseconds

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
        ("buffers of copied slots", f"{memory.buffer_bytes:,} bytes"),
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


def printable(text: str) -> str:
    """Text from a file without control characters, which could steer a terminal."""
    return "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text
    )

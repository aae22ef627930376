"""The Timeline that `run.timeline()` returns."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from offload.errors import TimelineError
from offload.timeline.spans import ExecutionTimeline

if TYPE_CHECKING:
    from rich.console import Console

    from offload.timeline.rank_timelines import RankTimelines

_PICTURES = "python -m pip install 'offload[pictures]'"


class Timeline:
    """Executions recorded in a with-block.

    Owner: the caller. Filled at the end of the block; from then on it is data without a device.

    Attributes:
        device: the backend's name.
        machine_name: the processor's name.
        versions: of the software that ran, by name, such as `torch`.
        executions: in order.
        origin_ns: the moment, of the executing clock, that spans count from.
        clock_reads: the clock reads of the recording; executions outside a block read it never.
        clock_read_ns: the cost of one read, measured when the block ended.
    """

    def __init__(self, device: str, machine_name: str, versions: dict[str, str]) -> None:
        self.device = device
        self.machine_name = machine_name
        self.versions = versions
        self.executions: tuple[ExecutionTimeline, ...] = ()
        self.origin_ns = 0
        self.clock_reads = 0
        self.clock_read_ns = 0.0

    @property
    def recording_cost_ns(self) -> int:
        """The time that recording has added to all executions together."""
        return round(self.clock_reads * self.clock_read_ns)

    def together(self, other: Timeline) -> Timeline:
        """This timeline's executions and another's on one axis, to compare schedulings.

        Raises:
            TimelineError: they are of different devices.
        """
        if (self.device, self.machine_name) != (other.device, other.machine_name):
            raise TimelineError(
                f"expected timelines of one device, got {self.device} on {self.machine_name} and "
                f"{other.device} on {other.machine_name}"
            )
        both = Timeline(self.device, self.machine_name, {**self.versions, **other.versions})
        both.origin_ns = min(self.origin_ns, other.origin_ns)
        both.executions = tuple(
            sorted(
                (
                    one.later(timeline.origin_ns - both.origin_ns)
                    for timeline in (self, other)
                    for one in timeline.executions
                ),
                key=lambda one: one.begin_ns,
            )
        )
        both.clock_reads = self.clock_reads + other.clock_reads
        both.clock_read_ns = max(self.clock_read_ns, other.clock_read_ns)
        return both

    def of_ranks(self, group: Any = None) -> RankTimelines | None:
        """Gather the timelines of all ranks of a process group on one axis, clocks aligned.

        All ranks call it at once, behind their blocks. The clocks' offsets are estimated by round
        trips (`distributed.clocks`).

        Args:
            group: of `torch.distributed`, on the CPU; None: the default one.

        Returns:
            All timelines on the group's first rank, to be saved as one trace; None on the others.

        Raises:
            ExecutionError: torch.distributed is not initialised, a rank ended, or did not come
                within the group's timeout.
        """
        ranks = _module("offload.timeline.rank_timelines")
        found: RankTimelines | None = ranks.gather_timelines(self, group)
        return found

    def show(self, console: Console | None = None) -> None:
        """Print tables: m_l_t by stage, launches and transfers, predicted beside measured.

        Args:
            console: a rich console; the terminal by default.
        """
        table, terminal = _module("offload.observe.timelines.table"), _module("rich.console")
        (console or terminal.Console()).print(table.timeline_tables(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace for Perfetto, chrome://tracing and Holistic Trace Analysis.

        Args:
            path: ends in `.json`, or in `.json.gz` to be compressed.

        Raises:
            TimelineError: the path has another ending, or there are no executions.
        """
        self._check_not_empty()
        _module("offload.observe.timelines.trace").save_trace(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw host-bound scheduling against model offload, and one execution with m_l_t marked.

        The first needs both schedulings, measured or predicted; otherwise only the second is drawn.

        Args:
            path: ends in `.svg`, `.pdf` or `.png`.

        Raises:
            TimelineError: the path has another ending, there are no executions, or matplotlib is
                not installed.
        """
        self._check_not_empty()
        _module("offload.observe.timelines.figures").save_figures(self, path)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with the figures, the tables and the trace.

        Raises:
            TimelineError: there are no executions, or matplotlib or jinja2 is not installed.
        """
        self._check_not_empty()
        _module("offload.observe.timelines.page").save_page(self, path)

    def _check_not_empty(self) -> None:
        if not any(one.spans or one.predicted for one in self.executions):
            raise TimelineError(
                "the timeline is empty: execute the model inside the with-block of timeline(), and "
                "use the timeline after the block"
            )


def _module(name: str) -> Any:
    """Import what only drawing needs: it takes a second.

    Raises:
        TimelineError: a package of the optional dependencies is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2"):
            raise
        raise TimelineError(f"this needs {error.name}, which is missing: {_PICTURES}") from error

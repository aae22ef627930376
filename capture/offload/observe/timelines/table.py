"""The timeline as tables for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from offload.observe.timelines.summary import (
    LaunchGroup,
    Quantity,
    Section,
    cost_sentence,
    heading,
    launch_groups,
    median_sentences,
    microseconds,
    sections_of,
)

if TYPE_CHECKING:
    from offload.timeline.timeline import Timeline

# The least width of operator names in a line; longer ones are folded.
_OPERATOR_WIDTH = 16
_ANY_WIDTH = 10_000


def timeline_tables(timeline: Timeline) -> RenderableType:
    """Executions, launches and the cost of recording; for an empty timeline, what to do."""
    if not timeline.executions:
        return Text("The timeline is empty: nothing was executed inside its with-block.")
    predicted = any(one.predicted for one in timeline.executions)
    parts: list[RenderableType] = [Text(heading(timeline), style="bold")]
    parts += [Text(sentence) for sentence in median_sentences(timeline)]
    parts.append(_executions_table(sections_of(timeline.executions), predicted))
    groups = launch_groups(timeline.executions)
    if groups:
        parts.append(_Launches(groups, predicted))
    if not predicted:
        parts.append(
            Text("Nothing is predicted: run.timeline(offload.calibrate()) compares with costs.")
        )
    parts.append(Text(cost_sentence(timeline)))
    return Group(*parts)


def _executions_table(sections: tuple[Section, ...], predicted: bool) -> Table:
    table = Table(title="Executions", title_justify="left")
    table.add_column("")
    table.add_column("count", justify="right")
    _add_time_columns(table, predicted)
    for section in sections:
        table.add_row(Text(section.title, style="bold"))
        if section.header:
            table.add_row(section.header)
        for quantity in section.quantities:
            table.add_row(quantity.label, *_figures(quantity, predicted))
        table.add_section()
    return table


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of launches, beside the operators."""

    name: str
    cells: tuple[str, ...]


class _Launches:
    """The table of launches, split in two if it is wider than the console."""

    def __init__(self, groups: Sequence[LaunchGroup], predicted: bool) -> None:
        self._operators = [group.total.label for group in groups]
        figures = zip(*(_figures(group.total, predicted) for group in groups), strict=True)
        names = ("count", *_time_names(predicted))
        self._times = [_Column(*one) for one in zip(names, figures, strict=True)]
        self._others = [
            _Column("longest", tuple(microseconds(group.longest_ns) for group in groups)),
            _Column("share", tuple(f"{100 * group.share:.1f} %" for group in groups)),
        ]
        if any(group.wait_ns for group in groups):
            waited = tuple(microseconds(group.wait_ns) for group in groups)
            self._others.append(_Column("waited for weights", waited))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or both parts."""
        columns = [*self._times, *self._others]
        narrow = self._table([one[:_OPERATOR_WIDTH] for one in self._operators], columns)
        if console.measure(narrow, options=options.update_width(_ANY_WIDTH)).maximum <= (
            options.max_width
        ):
            yield self._table(self._operators, columns)
            return
        yield self._table(self._operators, self._times)
        yield self._table(self._operators, self._others)

    def _table(self, operators: Sequence[str], columns: Sequence[_Column]) -> Table:
        table = Table(title="Launches, of all executions", title_justify="left")
        table.add_column("operator", overflow="fold", min_width=_OPERATOR_WIDTH)
        for one in columns:
            table.add_column(one.name, justify="right", no_wrap=True)
        for operator, *cells in zip(operators, *(one.cells for one in columns), strict=True):
            table.add_row(Text(operator), *cells)
        return table


def _add_time_columns(table: Table, predicted: bool) -> None:
    for name in _time_names(predicted):
        table.add_column(name, justify="right", no_wrap=True)


def _time_names(predicted: bool) -> tuple[str, ...]:
    return ("measured", *(("predicted", "error") if predicted else ()))


def _figures(quantity: Quantity, predicted: bool) -> tuple[str, ...]:
    count = "" if quantity.count is None else f"{quantity.count:,}"
    return (count, *(quantity.texts if predicted else quantity.texts[:1]))

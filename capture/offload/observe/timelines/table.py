"""The timeline as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
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


def timeline_tables(timeline: Timeline) -> RenderableType:
    """Executions, launches and the cost of recording; of an empty timeline, what to do."""
    if not timeline.executions:
        return Text("The timeline is empty: nothing was executed inside its with-block.")
    predicted = any(one.predicted for one in timeline.executions)
    parts: list[RenderableType] = [Text(heading(timeline), style="bold")]
    parts += [Text(sentence) for sentence in median_sentences(timeline)]
    parts.append(_executions_table(sections_of(timeline.executions), predicted))
    groups = launch_groups(timeline.executions)
    if groups:
        parts.append(_launches_table(groups, predicted))
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


def _launches_table(groups: tuple[LaunchGroup, ...], predicted: bool) -> Table:
    table = Table(title="Launches, of all executions", title_justify="left")
    table.add_column("operator", overflow="fold")
    table.add_column("count", justify="right")
    _add_time_columns(table, predicted)
    table.add_column("longest", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    waited = any(group.wait_ns for group in groups)
    if waited:
        table.add_column("waited for weights", justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            Text(group.total.label),
            *_figures(group.total, predicted),
            microseconds(group.longest_ns),
            f"{100 * group.share:.1f} %",
            *([microseconds(group.wait_ns)] if waited else ()),
        )
    return table


def _add_time_columns(table: Table, predicted: bool) -> None:
    for name in ("measured", *(("predicted", "error") if predicted else ())):
        table.add_column(name, justify="right", no_wrap=True)


def _figures(quantity: Quantity, predicted: bool) -> tuple[str, ...]:
    count = "" if quantity.count is None else f"{quantity.count:,}"
    return (count, *(quantity.texts if predicted else quantity.texts[:1]))

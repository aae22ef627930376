"""Sums over a timeline's spans: the figures in the table, the page and the pictures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from offload.timeline.spans import ExecutionTimeline, Span, SpanKind

if TYPE_CHECKING:
    from offload.timeline.timeline import Timeline

SHOWN_EXECUTIONS = 4
"""Up to this many executions are shown one by one; beyond, medians are shown."""

SHOWN_LAUNCHES = 10
"""Up to this many launches are listed one by one; beyond, they are summed by operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """A duration, measured and predicted.

    Attributes:
        name: of what; a stage of the header is indented under `m_l_t`, a substage under `submit`.
        measured_ns, predicted_ns: None if unknown.
        count: of launches, issues or transfers; None for other quantities.
        size_bytes: of transfers.
    """

    name: str
    measured_ns: float | None
    predicted_ns: float | None
    count: int | None = None
    size_bytes: int = 0

    @property
    def error_percent(self) -> float | None:
        """The prediction's excess over the measurement, in percent."""
        if not self.measured_ns or self.predicted_ns is None:
            return None
        return 100 * (self.predicted_ns - self.measured_ns) / self.measured_ns

    @property
    def label(self) -> str:
        """The name, with the size of transfers."""
        return f"{self.name}, {self.size_bytes:,} bytes" if self.size_bytes else self.name

    @property
    def texts(self) -> tuple[str, str, str]:
        """Measured, predicted and the error as text; a dash if unknown."""
        error = self.error_percent
        return (
            "-" if self.measured_ns is None else microseconds(self.measured_ns),
            "-" if self.predicted_ns is None else microseconds(self.predicted_ns),
            "-" if error is None else f"{error:+.1f} %",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """The quantities of one execution, or the medians of several.

    Attributes:
        title: which execution or executions.
        header: what its header changed; empty for several.
        quantities: in the order in which they are shown.
    """

    title: str
    header: str
    quantities: tuple[Quantity, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchGroup:
    """Launches summed over the measured executions.

    Attributes:
        total: by operator, with `#` and the launch's index before it if launches are listed;
            predicted only if every execution has a prediction.
        longest_ns: the longest of them.
        share: of the time of all launches.
        wait_ns: the time that they waited for weights, not included in `total`.
    """

    total: Quantity
    longest_ns: int
    share: float
    wait_ns: int = 0


def microseconds(duration_ns: float) -> str:
    """A duration as text: `12.34 us`."""
    return f"{duration_ns / 1e3:,.2f} us"


def extent_ns(spans: Sequence[Span]) -> int:
    """The time from the first begin to the last end; 0 without spans."""
    if not spans:
        return 0
    return max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)


def shown_spans(execution: ExecutionTimeline) -> tuple[Span, ...]:
    """The measured spans, or the predicted ones of an execution that was only predicted."""
    return execution.spans or execution.predicted


def representative(
    executions: Sequence[ExecutionTimeline], scheduling: str
) -> ExecutionTimeline | None:
    """The execution of a scheduling with the (lower) median end-to-end time.

    Measured executions come first; a predicted one is used if there are none. None if nothing was
    measured or predicted for this scheduling.
    """
    ours = [one for one in executions if one.scheduling == scheduling and shown_spans(one)]
    candidates = [one for one in ours if one.spans] or ours
    if not candidates:
        return None
    ordered = sorted(candidates, key=lambda one: extent_ns(shown_spans(one)))
    return ordered[(len(ordered) - 1) // 2]


def measured_of(
    executions: Sequence[ExecutionTimeline], scheduling: str
) -> tuple[ExecutionTimeline, ...]:
    """The measured executions of a scheduling, the shortest by total time first."""
    ours = (one for one in executions if one.spans and one.scheduling == scheduling)
    return tuple(sorted(ours, key=lambda one: extent_ns(one.spans)))


def median_sentences(timeline: Timeline) -> tuple[str, ...]:
    """For each scheduling measured more than once: its median execution and the spread."""
    names = dict.fromkeys(one.scheduling for one in timeline.executions)
    groups = [measured_of(timeline.executions, name) for name in names]
    sentences = []
    for group in groups:
        if len(group) > 1:
            median = group[(len(group) - 1) // 2]
            times = [microseconds(extent_ns(one.spans)) for one in (median, group[0], group[-1])]
            sentences.append(
                f"{median.scheduling} scheduling: execution {median.number:,} is the median of "
                f"{len(group):,} executions by total time, {times[0]} ({times[1]} to {times[2]})."
            )
    return tuple(sentences)


def merged_names(sequences: Iterable[Iterable[str]]) -> list[str]:
    """All names of several sequences, each a part of one common order, in that order.

    >>> merged_names([["enqueue"], ["copy", "enqueue"]])
    ['copy', 'enqueue']
    """
    merged: list[str] = []
    for names in sequences:
        place = 0
        for name in names:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return merged


def quantities_of(executions: Sequence[ExecutionTimeline]) -> tuple[Quantity, ...]:
    """m_l_t and its stages, issues, launches, transfers, weights, end to end, or their medians.

    What only some executions have counts as 0 in the others. A median of predictions exists only if
    every execution has one. At least one execution.
    """
    spans = [span for one in executions for span in (*one.spans, *one.predicted)]
    stages = dict.fromkeys(span.name for span in spans if span.kind is SpanKind.STAGE)
    substages = merged_names(
        [span.name for span in (*one.spans, *one.predicted) if span.kind is SpanKind.SUBSTAGE]
        for one in executions
    )
    kinds = {span.kind for span in spans}
    rows = []
    if stages:
        rows.append(_quantity("m_l_t", executions, SpanKind.STAGE))
        rows += [_quantity(f"  {name}", executions, SpanKind.STAGE, name) for name in stages]
        rows += [
            _quantity(f"    {name}", executions, SpanKind.SUBSTAGE, name) for name in substages
        ]
    rows += [
        _counted(name, executions, kind)
        for name, kind in (
            ("issues", SpanKind.ISSUE),
            ("launches", SpanKind.LAUNCH),
            ("transfers", SpanKind.TRANSFER),
            ("weights copied", SpanKind.WEIGHTS),
            ("waits for weights", SpanKind.WAIT),
            ("collectives", SpanKind.COLLECTIVE),
        )
        if kind in kinds
    ]
    if any(one.pass_ns is not None for one in executions):
        rows.append(_pass(executions))
    measured = _median([extent_ns(one.spans) if one.spans else None for one in executions])
    predicted = _median([extent_ns(one.predicted) if one.predicted else None for one in executions])
    return (*rows, Quantity("end to end", measured, predicted))


def sections_of(executions: Sequence[ExecutionTimeline]) -> tuple[Section, ...]:
    """A section per execution; if there are many, medians by scheduling, the first and the last."""
    if len(executions) <= SHOWN_EXECUTIONS:
        return tuple(_section(one) for one in executions)
    groups: dict[str, list[ExecutionTimeline]] = {}
    for one in executions:
        if one.spans:
            groups.setdefault(one.scheduling, []).append(one)
    medians = [
        Section(
            f"{scheduling} scheduling, medians of {len(group):,} executions",
            "",
            quantities_of(group),
        )
        for scheduling, group in groups.items()
    ]
    return (*medians, _section(executions[0]), _section(executions[-1]))


def launch_groups(executions: Sequence[ExecutionTimeline]) -> tuple[LaunchGroup, ...]:
    """The measured launches, one by one if few, else by operator in order of total duration.

    Beyond `SHOWN_LAUNCHES` groups, the last one sums the rest.
    """
    pairs = [
        (one.of_kind(SpanKind.LAUNCH), _launches(one.predicted), one.of_kind(SpanKind.WAIT))
        for one in executions
        if one.spans
    ]
    one_by_one = max((len(launches) for launches, _, _ in pairs), default=0) <= SHOWN_LAUNCHES
    predicted_all = all(predicted for _, predicted, _ in pairs)
    durations: dict[str, list[int]] = {}
    waits: dict[str, int] = {}
    predictions: dict[str, int] = {}
    for launches, predicted, waited in pairs:
        names = {span.launch: _launch_name(span, one_by_one) for span in launches}
        for span in launches:
            durations.setdefault(names[span.launch], []).append(span.duration_ns)
        for span in waited:
            name = names[span.launch]
            waits[name] = waits.get(name, 0) + span.duration_ns
        for span in predicted:
            name = _launch_name(span, one_by_one)
            predictions[name] = predictions.get(name, 0) + span.duration_ns
    total_ns = sum(map(sum, durations.values())) or 1
    groups = [
        LaunchGroup(
            Quantity(
                name, sum(times), predictions.get(name, 0) if predicted_all else None, len(times)
            ),
            max(times),
            sum(times) / total_ns,
            waits.get(name, 0),
        )
        for name, times in durations.items()
    ]
    if one_by_one:
        return tuple(groups)
    return _fold_rest(sorted(groups, key=lambda group: -(group.total.measured_ns or 0)))


def cost_sentence(timeline: Timeline) -> str:
    """A sentence on the time that recording has added."""
    executions_ns = sum(extent_ns(one.spans) for one in timeline.executions)
    cost_ns = timeline.recording_cost_ns
    share = f", {100 * cost_ns / executions_ns:.1f} % of their time" if executions_ns else ""
    return (
        f"Recording read the clock {timeline.clock_reads:,} times at {timeline.clock_read_ns:.1f} "
        f"ns each and so added {microseconds(cost_ns)} to the executions{share}."
    )


def heading(timeline: Timeline) -> str:
    """The number of executions, the machine, and the versions."""
    n = len(timeline.executions)
    versions = "".join(f", {name} {version}" for name, version in timeline.versions.items())
    return (
        f"{n:,} execution{'s' * (n != 1)} on {timeline.device} ({timeline.machine_name}){versions}"
    )


def _section(execution: ExecutionTimeline) -> Section:
    only = ", only predicted" if execution.predicted and not execution.spans else ""
    return Section(
        f"execution {execution.number:,}, {execution.scheduling} scheduling{only}",
        f"policy {execution.policy}: {execution.slots_changed:,} slots, "
        f"{execution.words_patched:,} words, {execution.bytes_copied:,} bytes copied",
        quantities_of([execution]),
    )


def _quantity(
    name: str,
    executions: Sequence[ExecutionTimeline],
    kind: SpanKind,
    span_name: str | None = None,
) -> Quantity:
    def durations_ns(spans: Sequence[Span]) -> list[int]:
        return [
            span.duration_ns
            for span in spans
            if span.kind is kind and span_name in (None, span.name)
        ]

    def is_measured(one: ExecutionTimeline) -> bool:
        return bool(one.spans) and (
            one.times_weights or kind not in (SpanKind.WEIGHTS, SpanKind.WAIT)
        )

    # A prediction without spans of this kind is None: a cost model may omit copies.
    predicted = [durations_ns(one.predicted) for one in executions]
    return Quantity(
        name,
        _median([sum(durations_ns(one.spans)) if is_measured(one) else None for one in executions]),
        _median([sum(durations) if durations else None for durations in predicted]),
    )


def _pass(executions: Sequence[ExecutionTimeline]) -> Quantity:
    """Launches and waits for weights together, until the outputs were ready."""
    predicted = [
        [span for span in one.predicted if span.kind in (SpanKind.LAUNCH, SpanKind.WAIT)]
        for one in executions
    ]
    return Quantity(
        "launches and waits",
        _median([one.pass_ns for one in executions]),
        _median([extent_ns(spans) if spans else None for spans in predicted]),
    )


def _counted(name: str, executions: Sequence[ExecutionTimeline], kind: SpanKind) -> Quantity:
    spans = [[span for span in shown_spans(one) if span.kind is kind] for one in executions]
    return dataclasses.replace(
        _quantity(name, executions, kind),
        count=round(statistics.median(map(len, spans))),
        size_bytes=round(statistics.median(sum(one.size_bytes for one in of) for of in spans)),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _launches(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.kind is SpanKind.LAUNCH)


def _launch_name(span: Span, one_by_one: bool) -> str:
    return f"#{span.launch} {span.name}" if one_by_one else span.name


def _fold_rest(groups: list[LaunchGroup]) -> tuple[LaunchGroup, ...]:
    """The first groups, and the others as a single group."""
    shown, rest = groups[:SHOWN_LAUNCHES], groups[SHOWN_LAUNCHES:]
    if not rest:
        return tuple(shown)
    totals = [group.total for group in rest]
    predictions = [one.predicted_ns for one in totals if one.predicted_ns is not None]
    total = Quantity(
        f"{len(rest):,} other operators",
        sum(one.measured_ns or 0 for one in totals),
        sum(predictions) if len(predictions) == len(totals) else None,
        sum(one.count or 0 for one in totals),
    )
    return (
        *shown,
        LaunchGroup(
            total,
            max(one.longest_ns for one in rest),
            sum(one.share for one in rest),
            sum(one.wait_ns for one in rest),
        ),
    )

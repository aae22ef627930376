"""Synthetic timelines: what recording would have found, with durations known to the test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from offload.timeline import HOST_LANE, ExecutionTimeline, Span, SpanKind, Timeline

DEVICE_LANE = "stream 7"
OPERATORS = ("aten::addmm", "aten::relu", "aten::add.Tensor", "aten::native_layer_norm", "aten::mm")
STAGES_NS = {"convert": 900, "policy": 120, "patch": 260, "submit": 700}
M_L_T_NS = sum(STAGES_NS.values())


def stage(name: str, begin_ns: int, end_ns: int) -> Span:
    return Span(SpanKind.STAGE, name, HOST_LANE, begin_ns, end_ns)


def issue(index: int, begin_ns: int, end_ns: int) -> Span:
    return Span(SpanKind.ISSUE, operator(index), HOST_LANE, begin_ns, end_ns, index)


def launch(index: int, begin_ns: int, end_ns: int, lane: str = DEVICE_LANE) -> Span:
    return Span(SpanKind.LAUNCH, operator(index), lane, begin_ns, end_ns, index)


def transfer(name: str, begin_ns: int, end_ns: int, size_bytes: int, lane: str) -> Span:
    return Span(SpanKind.TRANSFER, name, lane, begin_ns, end_ns, size_bytes=size_bytes)


def operator(index: int) -> str:
    return OPERATORS[index % len(OPERATORS)]


def execution(
    spans: Iterable[Span],
    predicted: Iterable[Span] = (),
    *,
    number: int = 1,
    scheduling: str = "offload",
    bytes_copied: int = 0,
) -> ExecutionTimeline:
    return ExecutionTimeline(
        number=number,
        scheduling=scheduling,
        spans=tuple(sorted(spans, key=lambda span: span.begin_ns)),
        predicted=tuple(predicted),
        policy="io",
        slots_changed=2,
        words_patched=5,
        bytes_copied=bytes_copied,
    )


def header(begin_ns: int, stages_ns: dict[str, int] | None = None) -> list[Span]:
    stages = []
    for name, duration_ns in (stages_ns or STAGES_NS).items():
        stages.append(stage(name, begin_ns, begin_ns + duration_ns))
        begin_ns += duration_ns
    return stages


def offloaded(
    n_launches: int, *, number: int = 1, begin_ns: int = 0, launch_ns: int = 1000
) -> ExecutionTimeline:
    """A header, then launches of `launch_ns` with 10 ns between; predicted to take 10 % longer."""
    stages = header(begin_ns)
    at_ns = stages[-1].end_ns
    launches = [
        launch(i, at_ns + i * (launch_ns + 10), at_ns + i * (launch_ns + 10) + launch_ns)
        for i in range(n_launches)
    ]
    predicted = header(begin_ns, {name: 2 * ns for name, ns in STAGES_NS.items()})
    at_ns, longer_ns = predicted[-1].end_ns, launch_ns + launch_ns // 10
    predicted += [
        launch(i, at_ns + i * longer_ns, at_ns + (i + 1) * longer_ns) for i in range(n_launches)
    ]
    return execution([*stages, *launches], predicted, number=number)


def with_substages(one: ExecutionTimeline, durations_ns: dict[str, int]) -> ExecutionTimeline:
    """The same execution on a device that reports the parts of its submit stage."""
    submit = next(span for span in one.of_kind(SpanKind.STAGE) if span.name == "submit")
    spans, at_ns = [], submit.begin_ns
    for name, duration_ns in durations_ns.items():
        spans.append(Span(SpanKind.SUBSTAGE, name, HOST_LANE, at_ns, at_ns + duration_ns))
        at_ns += duration_ns
    assert at_ns == submit.end_ns
    return dataclasses.replace(one, spans=(*one.spans, *spans))


def hosted(
    n_launches: int, *, number: int = 1, begin_ns: int = 0, launch_ns: int = 1000
) -> ExecutionTimeline:
    """Issues of 3 us, each launch begins 200 ns after the end of its issue; nothing predicted."""
    spans = [stage("convert", begin_ns, begin_ns + 900)]
    for i in range(n_launches):
        at_ns = begin_ns + 900 + i * 3000
        spans += [issue(i, at_ns, at_ns + 3000)]
        spans += [launch(i, at_ns + 3200, at_ns + 3200 + launch_ns)]
    return execution(spans, number=number, scheduling="host")


def timeline(executions: Sequence[ExecutionTimeline]) -> Timeline:
    made = Timeline("cpu", "Processor 1", {"torch": "2.13.0"})
    made.executions = tuple(executions)
    made.clock_reads = 1000
    made.clock_read_ns = 25.0
    return made


def both_schedulings(n_launches: int) -> Timeline:
    """Two offloaded executions, then two by the host."""
    made: list[ExecutionTimeline] = []
    for number, make in enumerate((offloaded, offloaded, hosted, hosted), start=1):
        begin_ns = made[-1].end_ns + 5000 if made else 0
        made.append(make(n_launches, number=number, begin_ns=begin_ns))
    return timeline(made)

"""A placement as text for the user, and for Graphviz."""

from __future__ import annotations

from collections.abc import Iterator

from offload.console.amounts import show_bytes, show_count
from offload.console.text import one_line
from offload.plan.task_placement import Objective, RunnerUp, Segment, TaskPlacement

_NAMED_TASKS = 6


def explain_lines(placement: TaskPlacement) -> Iterator[str]:
    """Yield lines on the result, each processor, and each segment with its reason and runner-up."""
    unit = placement.objective.unit
    yield (
        f"{placement.objective}: {_number(placement.value)} {unit}; no placement has less than "
        f"{_number(placement.lower_bound)}; found by {placement.method} in "
        f"{show_count(placement.n_evaluations, 'evaluation')}"
    )
    beside = {
        Objective.LATENCY: f"{placement.latency_ns:,} ns from begin to end",
        Objective.THROUGHPUT: f"{placement.period_ns:,} ns per input of a stream",
    }
    if any(one.busy_watts for one in placement.graph.processors):
        beside[Objective.ENERGY] = f"{_number(placement.energy_nj)} nJ"
    yield "  " + ", ".join(text for one, text in beside.items() if one is not placement.objective)
    if placement.latency_limit_ns is not None:
        yield f"  within a latency of {placement.latency_limit_ns:,} ns"
    if placement.candidates:
        tried = (f"{method} {_number(value)}" for method, value in placement.candidates)
        yield f"  heuristics: {', '.join(tried)}"
    yield from _processor_lines(placement)
    segments = placement.segments()
    movable = [_movable(placement, one) for one in segments]
    runners_up = placement.runners_up_of([one.tasks for one in movable])
    for index, rows in enumerate(zip(segments, movable, runners_up, strict=True)):
        yield from _segment_lines(placement, index, *rows)


def _movable(placement: TaskPlacement, segment: Segment) -> Segment:
    """The tasks of a segment that another processor can run; the segment where there are none."""
    found = tuple(
        task
        for task in segment.tasks
        if any(
            cost is not None and other != segment.processor
            for other, cost in enumerate(placement.graph.tasks[task].costs_ns)
        )
    )
    return Segment(segment.processor, found or segment.tasks)


def _processor_lines(placement: TaskPlacement) -> Iterator[str]:
    graph = placement.graph
    for index, processor in enumerate(graph.processors):
        tasks = [task for task, one in enumerate(placement.processors) if one == index]
        busy_ns = sum(graph.cost_ns(task, index) for task in tasks)
        memory_bytes = sum(graph.tasks[task].memory_bytes for task in tasks)
        limit = processor.memory_bytes
        of = "" if limit is None else f" of {show_bytes(limit)}"
        yield (
            f"{one_line(processor.name)}: {show_count(len(tasks), 'task')}, "
            f"{busy_ns:,} ns of work, {show_bytes(memory_bytes)}{of}"
        )


def _segment_lines(
    placement: TaskPlacement,
    index: int,
    segment: Segment,
    movable: Segment,
    runner_up: RunnerUp | None,
) -> Iterator[str]:
    graph = placement.graph
    names = [one_line(graph.tasks[task].name) for task in segment.tasks[:_NAMED_TASKS]]
    more = len(segment.tasks) - len(names)
    yield (
        f"segment {index} on {one_line(graph.processors[segment.processor].name)}, "
        f"{placement.begin_ns[segment.tasks[0]]:,} to {placement.end_ns[segment.tasks[-1]]:,} ns: "
        f"{', '.join(names)}{f' and {more} more' if more else ''}"
    )
    if runner_up is None:
        yield f"  {_only_reason(placement, movable)}"
        return
    n_stay = len(segment.tasks) - len(movable.tasks)
    if n_stay:
        yield f"  besides {show_count(n_stay, 'task')} that no other processor can run:"
    other = one_line(graph.processors[runner_up.processor].name)
    here = _taken(placement, movable, segment.processor)
    there = _taken(placement, movable, runner_up.processor)
    yield (
        f"  takes {here[0]:,} ns of work and {here[1]:,} ns of transfers here, {there[0]:,} and "
        f"{there[1]:,} on {other}"
    )
    change = ""
    if placement.value > 0:
        change = f" ({(runner_up.value / placement.value - 1):+.1%})"
    yield (
        f"  runner-up: on {other} {placement.objective} would be {_number(runner_up.value)} "
        f"{placement.objective.unit}{change}{_why_not(placement, runner_up)}"
    )


def _why_not(placement: TaskPlacement, runner_up: RunnerUp) -> str:
    if runner_up.value < placement.value:
        return ": less, which more evaluations would find"
    return ", no more than here" if runner_up.value == placement.value else ""


def _only_reason(placement: TaskPlacement, segment: Segment) -> str:
    others = [one for one in range(len(placement.graph.processors)) if one != segment.processor]
    costs = [placement.graph.tasks[task].costs_ns for task in segment.tasks]
    if not others:
        return "there is no other processor"
    if all(any(one[other] is None for one in costs) for other in others):
        return "no other processor can run it"
    in_time = "" if placement.latency_limit_ns is None else ", or is fast enough"
    return f"no other processor that can run it has the memory{in_time}"


def _taken(placement: TaskPlacement, segment: Segment, processor: int) -> tuple[int, int]:
    """A segment's costs on a processor: its work, and transfers to and from it, in ns."""
    graph, tasks = placement.graph, frozenset(segment.tasks)
    work_ns = sum(graph.cost_ns(task, processor) for task in tasks)
    transfers_ns = 0
    for edge in graph.edges:
        if (edge.producer in tasks) != (edge.consumer in tasks):
            at = [
                processor if one in tasks else placement.processors[one]
                for one in (edge.producer, edge.consumer)
            ]
            transfers_ns += graph.transfer_ns(edge, *at)
    return work_ns, transfers_ns


def dot_lines(placement: TaskPlacement) -> Iterator[str]:
    """Yield a box for each processor; edges inside are plain, transfers show their bytes and ns."""
    graph = placement.graph
    yield "digraph placement {"
    yield "  node [shape=box];"
    for index, processor in enumerate(graph.processors):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quoted(processor.name)};"
        for task, one in enumerate(placement.processors):
            if one == index:
                when = f"{placement.begin_ns[task]:,} to {placement.end_ns[task]:,} ns"
                yield f"    t{task} [label={_quoted(graph.tasks[task].name, when)}];"
        yield "  }"
    for edge in graph.edges:
        at = [placement.processors[one] for one in (edge.producer, edge.consumer)]
        label = ""
        if at[0] != at[1]:
            ns = graph.transfer_ns(edge, *at)
            label = f" [label={_quoted(show_bytes(edge.size_bytes), f'{ns:,} ns')}, style=bold]"
        yield f"  t{edge.producer} -> t{edge.consumer}{label};"
    yield "}"


def _quoted(*lines: str) -> str:
    """Text as a string in Graphviz's language, line by line."""
    escaped = (one_line(one).replace("\\", "\\\\").replace('"', '\\"') for one in lines)
    return '"' + "\\n".join(escaped) + '"'


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"

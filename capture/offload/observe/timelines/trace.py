"""The timeline as a Chrome trace with the names that Kineto gives to categories and arguments.

Read by Perfetto, chrome://tracing and Holistic Trace Analysis (HTA). HTA treats an event as the
device's if its arguments have a `stream`, as a copy if its name begins with `Memcpy`, and joins a
device event to the host event with the same `correlation`. Predicted events have neither of these
arguments, and a separate category, so HTA's breakdowns cover measured events only.

HTA rounds times to whole microseconds unless `HTA_DISABLE_NS_ROUNDING=1` is set; launches shorter
than that need it.

Source: pytorch/kineto, libkineto/src/output_json.cpp; HTA 0.6.1, hta/common/trace_parser.py.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import TimelineError
from offload.timeline.spans import HOST_LANE, ExecutionTimeline, Span, SpanKind

if TYPE_CHECKING:
    from offload.timeline.timeline import Timeline

Event = dict[str, Any]

# Kineto numbers the device's process by the device, and the host's by the operating system.
_DEVICE, _HOST, _PREDICTED = 0, 1, 2

_TRANSFERS = {"copy in": "Memcpy HtoD (copy in)", "copy out": "Memcpy DtoH (copy out)"}


def save_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace.

    Args:
        timeline: at least one execution.
        path: ends in `.json`, or in `.json.gz` to be compressed, as the readers expect.

    Raises:
        TimelineError: the path has another ending.
    """
    write_trace(trace_of(timeline), path)


def write_trace(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace, compressed where the path says so.

    Raises:
        TimelineError: the path does not end in `.json` or `.json.gz`.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise TimelineError(f"{path}: a trace's name must end in .json or .json.gz")
    text = json.dumps(trace)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object; times are float microseconds from the timeline's begin."""
    writer = _Writer(timeline.device)
    for execution in timeline.executions:
        writer.add_measured(execution)
    for execution in timeline.executions:
        writer.add_predicted(execution)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "deviceProperties": [{"id": _DEVICE, "name": timeline.machine_name}],
        # HTA requires the statement that this is the only process of its kind.
        "distributedInfo": {"rank": 0, "world_size": 1},
        "versions": timeline.versions,
        "traceEvents": [*writer.metadata(), *writer.events],
    }


def process_names(process: int) -> str:
    """What a trace's process is of: the host, the device or predictions."""
    return {_HOST: "host", _DEVICE: "device", _PREDICTED: "predicted"}[process]


class _Writer:
    """Collects events; assigns thread, correlation and flow numbers, each unique in the trace.

    A thread is one row of a lane. Slices of a thread must nest, so an execution that begins on a
    lane before an earlier one has ended there gets the next row.
    """

    def __init__(self, device: str) -> None:
        self.events: list[Event] = []
        self._processes = {
            _HOST: "host, measured",
            _DEVICE: f"device {device}, measured",
            _PREDICTED: "predicted",
        }
        self._threads: dict[tuple[int, str, int], int] = {}
        self._row_ends_ns: dict[tuple[int, str], list[int]] = {}
        self._correlations = 0
        self._flows = 0

    def metadata(self) -> list[Event]:
        """The names and the order of the processes and threads that events use."""
        used = {process for process, _, _ in self._threads}
        named = [
            _metadata(kind, process, 0, value)
            for order, (process, name) in enumerate(self._processes.items())
            if process in used
            for kind, value in (("process_name", name), ("process_sort_index", order))
        ]
        for (process, lane, row), thread in self._threads.items():
            name = f"{lane}, row {row + 1}" if row else lane
            named.append(_metadata("thread_name", process, thread, name))
            named.append(_metadata("thread_sort_index", process, thread, thread))
        return named

    def add_measured(self, execution: ExecutionTimeline) -> None:
        """Add host slices, device slices, and the flows that link them."""
        threads = self._place(execution.spans, None)
        host = [span for span in execution.spans if span.lane == HOST_LANE]
        if host:
            self.events.append(_annotation(execution, host, threads[HOST_LANE]))
        issues: dict[int, Event] = {}
        submission: Event | None = None
        for span in host:
            for event in self._host_events(span, threads[HOST_LANE]):
                self.events.append(event)
                if event["cat"] == "cuda_runtime" and span.kind is SpanKind.ISSUE:
                    issues[span.launch] = event
                elif event["cat"] == "cuda_runtime":
                    submission = event
        for span in execution.spans:
            if span.lane != HOST_LANE:
                cause = issues.get(span.launch) or submission
                self._add_device_event(span, threads[span.lane], cause)

    def add_predicted(self, execution: ExecutionTimeline) -> None:
        """Add slices in the process of predictions, which nothing else refers to."""
        threads = self._place(execution.predicted, _PREDICTED)
        if execution.predicted:
            host = [span for span in execution.predicted if span.lane == HOST_LANE]
            if host:
                event = _annotation(execution, host, threads[HOST_LANE])
                self.events.append(event | {"cat": "predicted", "pid": _PREDICTED})
        for span in execution.predicted:
            self.events.append(_slice("predicted", span.name, span, _PREDICTED, threads[span.lane]))

    def _place(self, spans: Sequence[Span], process: int | None) -> dict[str, int]:
        """For each lane, the thread of the first row that is free when the spans begin."""
        threads = {}
        for lane in dict.fromkeys(span.lane for span in spans):
            begin_ns = min(span.begin_ns for span in spans if span.lane == lane)
            end_ns = max(span.end_ns for span in spans if span.lane == lane)
            where = process if process is not None else _HOST if lane == HOST_LANE else _DEVICE
            ends_ns = self._row_ends_ns.setdefault((where, lane), [])
            free = [row for row, row_end_ns in enumerate(ends_ns) if row_end_ns <= begin_ns]
            row = free[0] if free else len(ends_ns)
            ends_ns[row : row + 1] = [end_ns]
            threads[lane] = self._threads.setdefault((where, lane, row), len(self._threads) + 1)
        return threads

    def _host_events(self, span: Span, thread: int) -> list[Event]:
        """The slice, and within it the call that makes the device work, if there is one."""
        if span.kind in (SpanKind.STAGE, SpanKind.SUBSTAGE):
            slices = [_slice("user_annotation", span.name, span, _HOST, thread)]
            call = "submit" if span.name == "submit" else None
        else:
            slices = [_slice("cpu_op", span.name, span, _HOST, thread)]
            call = "launch" if span.kind is SpanKind.ISSUE else None
        if call:
            self._correlations += 1
            event = _slice("cuda_runtime", call, span, _HOST, thread)
            event["args"]["correlation"] = self._correlations
            slices.append(event)
        return slices

    def _add_device_event(self, span: Span, thread: int, cause: Event | None) -> None:
        if span.kind in (SpanKind.WAIT, SpanKind.COLLECTIVE):  # the device runs no launch for it
            category = "wait" if span.kind is SpanKind.WAIT else "collective"
            self.events.append(_slice(category, span.name, span, _DEVICE, thread))
            return
        transfer = span.kind in (SpanKind.TRANSFER, SpanKind.WEIGHTS)
        event = _slice(
            "gpu_memcpy" if transfer else "kernel",
            _TRANSFERS.get(span.name, f"Memcpy {span.name}") if transfer else span.name,
            span,
            _DEVICE,
            thread,
        )
        event["args"] |= {"device": _DEVICE, "stream": thread}
        self.events.append(event)
        # Work that began before the submission (an input's copy) was not caused by it, and weights
        # are copied when their place is free.
        if cause is None or cause["ts"] > event["ts"] or span.kind is SpanKind.WEIGHTS:
            return
        event["args"]["correlation"] = cause["args"]["correlation"]
        self._flows += 1
        for phase, end in (("s", cause), ("f", event)):
            flow = {key: end[key] for key in ("pid", "tid", "ts")}
            flow |= {"ph": phase, "id": self._flows, "cat": "ac2g", "name": "ac2g"}
            self.events.append(flow | ({"bp": "e"} if phase == "f" else {}))


def _annotation(execution: ExecutionTimeline, spans: Sequence[Span], thread: int) -> Event:
    """The slice around the host's work for an execution."""
    around = Span(
        SpanKind.STAGE,
        f"execution {execution.number} ({execution.scheduling} scheduling)",
        HOST_LANE,
        min(span.begin_ns for span in spans),
        max(span.end_ns for span in spans),
    )
    event = _slice("user_annotation", around.name, around, _HOST, thread)
    event["args"] |= {
        "policy": execution.policy,
        "slots changed": execution.slots_changed,
        "words patched": execution.words_patched,
        "bytes copied": execution.bytes_copied,
        "bytes streamed": execution.bytes_streamed,
    }
    if execution.pass_ns is not None:
        event["args"]["launches and waits (us)"] = execution.pass_ns / 1e3
    return event


def _slice(category: str, name: str, span: Span, process: int, thread: int) -> Event:
    arguments: dict[str, Any] = {}
    if span.launch >= 0:
        arguments["launch"] = span.launch
    if span.place:
        arguments["place"] = span.place
    if span.kind in (SpanKind.TRANSFER, SpanKind.WEIGHTS):
        arguments["bytes"] = span.size_bytes
        if span.duration_ns and span.kind is SpanKind.TRANSFER:
            arguments["memory bandwidth (GB/s)"] = span.size_bytes / span.duration_ns
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": span.begin_ns / 1e3,
        "dur": span.duration_ns / 1e3,
        "args": arguments,
    }


def _metadata(kind: str, process: int, thread: int, value: str | int) -> Event:
    key = "name" if isinstance(value, str) else "sort_index"
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": thread,
        "ts": 0.0,
        "args": {key: value},
    }

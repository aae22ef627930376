"""Reads trace files of torch.profiler (Kineto): the device's work and the host's operators.

Source of the format: torch.profiler's `export_chrome_trace`, and the Trace Event Format that it
follows. Times are microseconds, often with three decimals.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.errors import FileError
from offload.observe.diagnosis.idle import DeviceWork

DEVICE_CATEGORIES = frozenset(
    ("kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "mtia_ccp_events")
)
"""Categories of device work in Holistic Trace Analysis 0.6.1."""

_OPERATOR_CATEGORIES = frozenset(("cpu_op", "Operator"))
_GZIP_MAGIC = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True, slots=True)
class ProfiledOperator:
    """An operator's time on the host under a profiler; not the model's own.

    Attributes:
        name: the operator, such as `aten::addmm`.
        n_calls: the number of its calls.
        self_ns: its time without the operators that it called, launch calls included.
    """

    name: str
    n_calls: int
    self_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class KinetoTrace:
    """The parts of a trace file that a diagnosis needs.

    Attributes:
        work: the device's work; at least one piece.
        operators: on the host, longest self time first.
    """

    work: tuple[DeviceWork, ...]
    operators: tuple[ProfiledOperator, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    name: str
    category: str
    process: str
    thread: str
    begin_ns: int
    end_ns: int
    stream: int | None
    correlation: int | None


def read_kineto(path: str | os.PathLike[str]) -> KinetoTrace:
    """Read a trace file, compressed by gzip or not.

    Raises:
        FileError: it cannot be read, is not a trace, has a malformed event (the message gives its
            position in `traceEvents`), or has no work of a device.
    """
    events = list(_complete_events(Path(path), _load(Path(path))))
    work = _device_work(events)
    if not work:
        raise FileError(
            f"{path}: none of its {len(events)} complete events is a kernel, copy or fill on a "
            "stream of a device, so there is no idle time to split: record it with "
            "ProfilerActivity.CUDA, or on the CPU diagnose the model itself"
        )
    return KinetoTrace(work, _host_operators(events))


def _load(path: Path) -> list[Any]:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        document = json.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected a trace as JSON: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FileError(
            f"{path}: expected a list of events, or an object with the list `traceEvents`"
        )
    return events


def _complete_events(path: Path, events: list[Any]) -> Iterator[_Event]:
    """The events with a begin and a duration; instants, counters, flows and names are skipped.

    Raises:
        FileError: one of them has invalid times.
    """
    for position, event in enumerate(events):
        where = f"{path}: traceEvents[{position}]"
        if not isinstance(event, dict):
            raise FileError(f"{where}: expected an object, got a {type(event).__name__}")
        if event.get("ph") != "X":
            continue
        begin_ns, duration_ns = (_nanoseconds(event, key, where) for key in ("ts", "dur"))
        if duration_ns < 0:
            raise FileError(f"{where}: expected dur >= 0, got {event['dur']}")
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        yield _Event(
            name=str(event.get("name", "")),
            category=str(event.get("cat", "")),
            process=str(arguments.get("device", event.get("pid", ""))),
            thread=f"{event.get('pid', '')}/{event.get('tid', '')}",
            begin_ns=begin_ns,
            end_ns=begin_ns + duration_ns,
            stream=_whole_number(arguments, "stream"),
            correlation=_whole_number(arguments, "correlation"),
        )


def _nanoseconds(event: Mapping[str, Any], key: str, where: str) -> int:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FileError(f"{where}: expected `{key}` as a number of microseconds, got {value!r}")
    return round(value * 1000)


def _whole_number(arguments: Mapping[str, Any], key: str) -> int | None:
    """A stream or correlation id; None if there is none, which Kineto also writes as -1."""
    try:
        number = int(arguments[key])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return number if number >= 0 else None


def _device_work(events: list[_Event]) -> tuple[DeviceWork, ...]:
    on_device = [
        one for one in events if one.stream is not None and one.category in DEVICE_CATEGORIES
    ]
    calls: dict[int, _Event] = {}
    for one in events:
        if one.stream is None and one.correlation is not None:
            known = calls.get(one.correlation)
            if known is None or one.begin_ns < known.begin_ns:
                calls[one.correlation] = one
    several = len({one.process for one in on_device}) > 1
    work = []
    for one in on_device:
        call = None if one.correlation is None else calls.get(one.correlation)
        stream = f"stream {one.stream}"
        work.append(
            DeviceWork(
                lane=f"device {one.process} {stream}" if several else stream,
                begin_ns=one.begin_ns,
                end_ns=one.end_ns,
                issued_ns=None if call is None else call.begin_ns,
                issue_ns=None if call is None else call.end_ns - call.begin_ns,
            )
        )
    return tuple(work)


def _host_operators(events: list[_Event]) -> tuple[ProfiledOperator, ...]:
    """Self times by operator: complete events of one thread nest."""
    self_ns: dict[str, int] = {}
    n_calls: dict[str, int] = {}
    operators = [one for one in events if one.category in _OPERATOR_CATEGORIES]
    open_ones: dict[str, list[_Event]] = {}
    for one in sorted(operators, key=lambda event: (event.begin_ns, -event.end_ns)):
        callers = open_ones.setdefault(one.thread, [])
        while callers and callers[-1].end_ns <= one.begin_ns:
            callers.pop()
        duration_ns = one.end_ns - one.begin_ns
        self_ns[one.name] = self_ns.get(one.name, 0) + duration_ns
        n_calls[one.name] = n_calls.get(one.name, 0) + 1
        if callers:
            self_ns[callers[-1].name] -= duration_ns
        callers.append(one)
    found = (ProfiledOperator(name, n_calls[name], self_ns[name]) for name in self_ns)
    return tuple(sorted(found, key=lambda one: (-one.self_ns, one.name)))

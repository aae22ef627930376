"""Choose the device of each segment, from the plan, measured durations, and what is copied."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from offload.native import _native, _planner
from offload.plan.topology import Link
from offload.program import Value

# Smaller changes of a pace since the last choice lead to no new choice.
_CHANGED = 0.05

# A choice is replaced only where the new one is better by more than the error of estimates.
_BETTER = 0.98

# Evaluations of other devices in one choice of `hybrid`; a search continues in the next one. About
# 0.5 us each for ten segments (bench/bench_devices.py).
_N_EVALUATIONS = 16

_CALLER = -1
_NO_LINK = (0.0, 1.0)  # within a memory, which is not read
_CANNOT_RUN = -1.0


class Placement(enum.StrEnum):
    """When the device of a segment is chosen."""

    STATIC = "static"  # at load
    HYBRID = "hybrid"  # at load, and again where executions take longer than expected
    DYNAMIC = "dynamic"  # when a segment is ready: the device that finishes it first


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentCosts:
    """The costs of a segment, and the segments that it waits for.

    Attributes:
        costs_ns: by device; None where it is not loaded.
        after: the segments whose results it reads, by index; all are earlier.
        planned: the device chosen at load.
        reads: the Values that it takes, by their index in the whole Program.
        makes: those that it makes and that others or the caller read.
    """

    costs_ns: tuple[float | None, ...]
    after: tuple[int, ...]
    planned: int
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Crossings:
    """The costs of what segments in separate memories copy.

    Attributes:
        memory_of: the number of each device's memory, from 0 on; equal where it is shared.
        home: the number of the caller's.
        links: the cost of a copy from one memory to another, for all pairs.
        size_bytes: of each Value that crosses.
        returned: the Values that the caller sees.
    """

    memory_of: tuple[int, ...]
    home: int
    links: Mapping[tuple[int, int], Link]
    size_bytes: Mapping[int, int]
    returned: frozenset[int]

    @classmethod
    def between(
        cls,
        memories: Sequence[object],
        home: int,
        links: Mapping[tuple[int, int], Link],
        values: Sequence[Value],
        returned: Set[int],
    ) -> Crossings:
        """Number the memories of devices.

        Args:
            memories: of each device; the same object where it is shared.
            home: the device with the caller's memory.
            links: between devices.
            values: of the whole Program.
            returned: as `returned` above.
        """
        distinct = list(dict.fromkeys(memories))
        memory_of = tuple(distinct.index(one) for one in memories)
        return cls(
            memory_of,
            memory_of[home],
            {(memory_of[one], memory_of[other]): link for (one, other), link in links.items()},
            {one.index: one.size_bytes for one in values},
            frozenset(returned),
        )


class DeviceChoice:
    """Chooses devices for the segments of each execution.

    A device's pace is the measured duration of its segments over the expected one, smoothed and
    without outliers. The pace of a device that executes nothing decays, so that it is tried again.

    `hybrid` begins with the plan, and searches single segments, pairs and runs of them to move
    while the paces predict an improvement: a limited number in each choice, so that a search takes
    several executions. `dynamic` plans an execution, whose segments `dispatch` gives to devices
    when they are ready: it gives each segment in turn to the device that finishes it first,
    including the copies of what it reads and behind the executions under way, or all segments to
    one device where that is better (`dmda` of StarPU; the source is named in
    native/include/offload/device_choice.hpp). The result depends only on observations, and for
    `dynamic` on executions under way. It is kept while paces stay within a twentieth.

    Owner: one executable. Thread: one at a time; `native_paces` are shared with a dispatch.

    Attributes:
        graph: the arguments of a native SegmentGraph; empty without segments.
        shared: the Values that the numbers of its values stand for.
        native_paces: the paces, and the number of executions under way of `dynamic`.
        n_moved: segments that were moved by choices.
    """

    def __init__(
        self,
        segments: Sequence[SegmentCosts],
        placement: Placement,
        hand_over_ns: float,
        *,
        is_throughput: bool = False,
        crossings: Crossings | None = None,
        clock_ns: Callable[[], float] = time.monotonic_ns,
    ) -> None:
        """Begin with the plan, and with all devices at the expected pace.

        Args:
            segments: in an order in which they may run.
            placement: when devices are chosen.
            hand_over_ns: the cost of continuing on another device.
            is_throughput: whether the work of the busiest device counts, and not the latency.
            crossings: what is copied; None: all devices share one memory.
            clock_ns: the time.
        """
        self._segments = tuple(segments)
        self._placement = placement
        self._is_throughput = is_throughput
        self._clock_ns = clock_ns
        n_devices = len(segments[0].costs_ns) if segments else 0
        self.shared = shared_values(segments, crossings) if crossings else ()
        self.graph = (
            _graph_of(segments, n_devices, hand_over_ns, crossings, self.shared) if segments else {}
        )
        self._search = _planner.DeviceSearch(**self.graph) if segments else None
        self.native_paces = _native.DevicePaces([1.0] * n_devices)
        self._chosen_at: tuple[float, ...] = ()
        self._is_searching = False
        self._devices = tuple(one.planned for one in segments)
        self._was_busy = False  # whether executions were under way at the last choice
        self._free_at_ns = [0.0] * n_devices  # by the clock, when executions under way have ended
        self.n_moved = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether segments are given to devices one by one."""
        return self._placement is Placement.DYNAMIC

    @property
    def is_static(self) -> bool:
        """Whether devices never change."""
        return self._placement is Placement.STATIC

    @property
    def paces(self) -> tuple[float, ...]:
        """By device, the measured duration of its segments over the expected one."""
        return tuple(self.native_paces.values)

    @property
    def is_throughput(self) -> bool:
        """Whether the work of the busiest device counts, and not the latency."""
        return self._is_throughput

    def choose(self) -> tuple[int, ...]:
        """Choose the device of each segment, for the execution that is queued now.

        `ended` must be called for it.
        """
        if self.is_static or self._search is None:
            return self._devices
        if self._placement is Placement.DYNAMIC:
            self._choose_earliest(self._search)
        else:
            self._choose_better(self._search)
        return self._devices

    def dispatch(self) -> _planner.SegmentDispatch:
        """Return a new dispatch of these segments, which decides alone."""
        return _planner.SegmentDispatch(**self.graph, is_throughput=self._is_throughput)

    def ended(self, devices: Sequence[int], took_ns: Sequence[float | None]) -> None:
        """Note the end of an execution: the durations of its segments; None where unknown."""
        n_devices = len(self.paces)
        expected = [0.0] * n_devices
        took = [0.0] * n_devices
        for one, device, ns in zip(self._segments, devices, took_ns, strict=True):
            cost_ns = one.costs_ns[device]
            if ns is not None and cost_ns is not None:
                expected[device] += cost_ns
                took[device] += ns
        for device, expected_ns in enumerate(expected):
            self.native_paces.observe(device, expected_ns, took[device])
        self.native_paces.forget([expected_ns > 0 for expected_ns in expected])
        self.failed()

    def failed(self) -> None:
        """Note the end of an execution that failed or was refused."""
        if self.is_dynamic:
            self.native_paces.end_execution()

    def notice_fork(self) -> None:
        """Forget executions under way, in the child of a fork; they have ended there."""
        self.native_paces.notice_fork()

    def value(self, devices: Sequence[int], free_ns: Sequence[float] = ()) -> float:
        """The latency of one execution, or the work of the busiest device, at these paces.

        Args:
            devices: of each segment.
            free_ns: by device, when it has ended earlier executions; 0 if not given.
        """
        if self._search is None:
            return 0.0
        paces = self.paces
        free_ns = free_ns or [0.0] * len(paces)
        return self._search.value(devices, paces, free_ns, is_throughput=self._is_throughput)

    def _choose_earliest(self, search: _planner.DeviceSearch) -> None:
        now_ns, paces = self._clock_ns(), self.paces
        is_busy = self.native_paces.n_under_way > 0
        free_ns = [max(0.0, one - now_ns) if is_busy else 0.0 for one in self._free_at_ns]
        if self._has_changed(paces) or any(free_ns) or self._was_busy:
            self._was_busy = any(free_ns)
            self._chosen_at = paces
            search.begin([self._devices], paces, free_ns, is_throughput=self._is_throughput)
            self._adopt(search, free_ns)
        freed_ns = search.freed(self._devices, paces, free_ns)
        self._free_at_ns = [now_ns + one for one in freed_ns]
        self.native_paces.begin_execution()

    def _choose_better(self, search: _planner.DeviceSearch) -> None:
        paces = self.paces
        idle_ns = [0.0] * len(paces)
        if self._has_changed(paces):
            self._chosen_at = paces
            planned = tuple(one.planned for one in self._segments)
            search.begin(
                [self._devices, planned], paces, idle_ns, is_throughput=self._is_throughput
            )
            self._is_searching = True
        if self._is_searching:
            self._is_searching = not search.improve(_N_EVALUATIONS)
            self._adopt(search, idle_ns)

    def _adopt(self, search: _planner.DeviceSearch, free_ns: Sequence[float]) -> None:
        if search.found_value < _BETTER * self.value(self._devices, free_ns):
            found = tuple(search.found)
            self.n_moved += sum(map(int.__ne__, found, self._devices))
            self._devices = found

    def _has_changed(self, paces: Sequence[float]) -> bool:
        if not self._chosen_at:
            return True
        pairs = zip(paces, self._chosen_at, strict=True)
        return any(abs(pace - before) > _CHANGED * before for pace, before in pairs)


def _graph_of(
    segments: Sequence[SegmentCosts],
    n_devices: int,
    hand_over_ns: float,
    crossings: Crossings | None,
    shared: Sequence[SharedValues],
) -> dict[str, Any]:
    """The arguments of a native SegmentGraph."""
    memory_of = crossings.memory_of if crossings else (0,) * n_devices
    n_memories = max(memory_of) + 1
    pairs = [(one, other) for one in range(n_memories) for other in range(n_memories)]
    links = [_NO_LINK] * len(pairs)
    if crossings is not None:
        for at, pair in enumerate(pairs):
            if pair[0] != pair[1]:
                link = crossings.links[pair]
                links[at] = (link.overhead_ns, link.bytes_per_second)
    return {
        "n_devices": n_devices,
        "costs_ns": [
            _CANNOT_RUN if cost is None else cost for one in segments for cost in one.costs_ns
        ],
        "after": [one.after for one in segments],
        "hand_over_ns": hand_over_ns,
        "memory_of": memory_of,
        "home": crossings.home if crossings else 0,
        "links": links,
        "values": [
            (one.producer, float(one.size_bytes), one.readers, one.is_returned) for one in shared
        ],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class SharedValues:
    """Values with the same producer and readers, which are copied together.

    Attributes:
        values: their indices in the whole Program.
        producer: the segment that makes them; -1: the caller.
        size_bytes: of all.
        readers: the segments that read them, ascending.
        is_returned: whether the caller reads them too.
    """

    values: tuple[int, ...]
    producer: int
    size_bytes: int
    readers: tuple[int, ...]
    is_returned: bool


def shared_values(
    segments: Sequence[SegmentCosts], crossings: Crossings
) -> tuple[SharedValues, ...]:
    """Return the Values that cross, by their producers and readers; producers ascend."""
    made = {value: at for at, one in enumerate(segments) for value in one.makes}
    readers: dict[int, list[int]] = {value: [] for value in made}
    for at, one in enumerate(segments):
        for value in dict.fromkeys(one.reads):
            readers.setdefault(value, []).append(at)
    found: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}
    for value, segments_that_read in readers.items():
        producer = made.get(value, _CALLER)
        is_returned = producer != _CALLER and value in crossings.returned
        key = producer, tuple(segments_that_read), is_returned
        found.setdefault(key, []).append(value)
    return tuple(
        SharedValues(
            tuple(values),
            producer,
            sum(crossings.size_bytes[value] for value in values),
            read,
            is_returned,
        )
        for (producer, read, is_returned), values in sorted(
            found.items(), key=lambda one: one[0][0]
        )
    )

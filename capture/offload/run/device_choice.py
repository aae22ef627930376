"""Choose the device of each segment, from the plan and from measured durations."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence

# The weight of a new observation of a device's pace, and the share that a pace without an
# observation loses.
_NEWEST = 0.5
_FORGOTTEN = 0.02

# Smaller changes of a pace since the last choice lead to no new choice.
_CHANGED = 0.05

# A choice is replaced only where the new one is better by more than the error of estimates.
_BETTER = 0.98


class Placement(enum.StrEnum):
    """When the device of a segment is chosen."""

    STATIC = "static"  # at load
    HYBRID = "hybrid"  # at load, and again where executions take longer than expected
    DYNAMIC = "dynamic"  # at each execution: the device that finishes the segment first


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentCosts:
    """The costs of a segment, and the segments that it waits for.

    Attributes:
        costs_ns: by device; None where it is not loaded.
        after: the segments whose results it reads, by index; all are earlier.
        planned: the device chosen at load.
    """

    costs_ns: tuple[float | None, ...]
    after: tuple[int, ...]
    planned: int


class DeviceChoice:
    """Chooses devices for the segments of each execution.

    A device's pace is the measured duration of its segments over the expected one, smoothed. The
    pace of a device that executes nothing decays, so that it is tried again. `hybrid` begins with
    the plan and moves single segments while the paces predict an improvement; `dynamic` gives each
    segment in turn to the device that finishes it first (earliest finish time, as HEFT: Topcuoglu,
    Hariri, Wu, IEEE TPDS 13(3), 2002, section 4.1). The result depends only on observations, and is
    kept while paces stay within a twentieth.

    Owner: one executable. Thread: one at a time.
    """

    def __init__(
        self,
        segments: Sequence[SegmentCosts],
        placement: Placement,
        hand_over_ns: float,
        *,
        is_throughput: bool = False,
    ) -> None:
        """Begin with the plan, and with all devices at the expected pace."""
        self._segments = tuple(segments)
        self._placement = placement
        self._hand_over_ns = hand_over_ns
        self._is_throughput = is_throughput
        n_devices = len(segments[0].costs_ns) if segments else 0
        self._paces = [1.0] * n_devices
        self._chosen_at: list[float] = []
        self._devices = tuple(one.planned for one in segments)
        self.n_moved = 0

    @property
    def is_static(self) -> bool:
        """Whether devices never change."""
        return self._placement is Placement.STATIC

    @property
    def paces(self) -> tuple[float, ...]:
        """By device, the measured duration of its segments over the expected one."""
        return tuple(self._paces)

    def choose(self) -> tuple[int, ...]:
        """Choose the device of each segment, for the execution that is queued now."""
        if self.is_static or not self._has_changed():
            return self._devices
        self._chosen_at = list(self._paces)
        if self._placement is Placement.DYNAMIC:
            found = self._earliest()
        else:
            found = self._mended(tuple(one.planned for one in self._segments))
        if self.value(found) < _BETTER * self.value(self._devices):
            self.n_moved += sum(map(int.__ne__, found, self._devices))
            self._devices = found
        return self._devices

    def ended(self, devices: Sequence[int], took_ns: Sequence[float | None]) -> None:
        """Note the durations of an execution's segments on their devices; None where unknown."""
        expected = [0.0] * len(self._paces)
        took = [0.0] * len(self._paces)
        for one, device, ns in zip(self._segments, devices, took_ns, strict=True):
            cost_ns = one.costs_ns[device]
            if ns is not None and cost_ns is not None:
                expected[device] += cost_ns
                took[device] += ns
        for device, expected_ns in enumerate(expected):
            if expected_ns:
                newest = took[device] / expected_ns
                self._paces[device] += _NEWEST * (newest - self._paces[device])
            else:
                self._paces[device] += _FORGOTTEN * (1.0 - self._paces[device])

    def value(self, devices: Sequence[int]) -> float:
        """The latency of one execution, or the work of the busiest device, at these paces."""
        free = [0.0] * len(self._paces)
        ends: list[float] = []
        for one, device in zip(self._segments, devices, strict=True):
            ends.append(self._end_ns(one, device, devices, ends, free))
            free[device] = ends[-1]
        if not self._is_throughput:
            return max(ends, default=0.0)
        busy = [0.0] * len(self._paces)
        for one, device in zip(self._segments, devices, strict=True):
            busy[device] += self._cost_ns(one, device)
        return max(busy, default=0.0)

    def _has_changed(self) -> bool:
        if not self._chosen_at:
            return True
        pairs = zip(self._paces, self._chosen_at, strict=True)
        return any(abs(pace - before) > _CHANGED * before for pace, before in pairs)

    def _cost_ns(self, one: SegmentCosts, device: int) -> float:
        cost_ns = one.costs_ns[device]
        assert cost_ns is not None  # only devices that have the segment are considered
        return cost_ns * self._paces[device]

    def _end_ns(
        self,
        one: SegmentCosts,
        device: int,
        devices: Sequence[int],
        ends: Sequence[float],
        free: Sequence[float],
    ) -> float:
        ready = [
            ends[at] + (self._hand_over_ns if devices[at] != device else 0.0) for at in one.after
        ]
        return max(free[device], *ready, 0.0) + self._cost_ns(one, device)

    def _able(self, one: SegmentCosts) -> Iterator[int]:
        return (device for device, cost_ns in enumerate(one.costs_ns) if cost_ns is not None)

    def _earliest(self) -> tuple[int, ...]:
        free = [0.0] * len(self._paces)
        ends: list[float] = []
        devices: list[int] = []
        for one in self._segments:
            by_device: Mapping[int, float] = {
                device: self._end_ns(one, device, devices, ends, free) for device in self._able(one)
            }
            device = min(by_device, key=lambda each: by_device[each])
            devices.append(device)
            ends.append(by_device[device])
            free[device] = ends[-1]
        return tuple(devices)

    def _mended(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Improve by moving one segment, swapping two, or moving all to one device."""
        best, least = devices, self.value(devices)
        while True:
            moves = [*self._moves(best), self._earliest()]
            found = min(moves, key=self.value)
            if self.value(found) >= _BETTER * least:
                return best
            best, least = found, self.value(found)

    def _moves(self, devices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for at, one in enumerate(self._segments):
            for device in self._able(one):
                yield (*devices[:at], device, *devices[at + 1 :])
        for first, second in itertools.combinations(range(len(devices)), 2):
            exchanged = list(devices)
            exchanged[first], exchanged[second] = devices[second], devices[first]
            is_able = (
                self._segments[at].costs_ns[exchanged[at]] is not None for at in (first, second)
            )
            if devices[first] != devices[second] and all(is_able):
                yield tuple(exchanged)
        for device in range(len(self._paces)):
            yield tuple(
                device if one.costs_ns[device] is not None else before
                for one, before in zip(self._segments, devices, strict=True)
            )

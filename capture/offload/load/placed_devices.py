"""The devices of a placement: their backends, the memories of tensors, and the links."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.backends import Backend
from offload.errors import BackendUnavailable
from offload.load.options import named_backend
from offload.plan.topology import Link
from offload.program import Program
from offload.run.transfers import Memory, Piece, copy_pieces, stream_between

Device = str | torch.device | Backend

# For devices that share memory: one reads the other's results in place.
SHARED_BYTES_PER_SECOND = 1e18

_SMALL_BYTES, _LARGE_BYTES = 1 << 16, 1 << 23
_N_COPIES = 5
_MOST_BYTES_PER_SECOND = 1e12


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedDevices:
    """The devices of one load.

    Attributes:
        names: for the user, with their position where several are equal.
        backends: of each.
        memories: of each; devices that share memory have the same object.
        home: the first device with the memory in which the Program was recorded.
    """

    names: tuple[str, ...]
    backends: tuple[Backend, ...]
    memories: tuple[Memory, ...]
    home: int

    @property
    def has_others(self) -> bool:
        """Whether any device has separate memory."""
        return any(one is not self.memories[self.home] for one in self.memories)

    def shares(self, at: int) -> bool:
        """Whether a device reads the caller's memory."""
        return self.memories[at] is self.memories[self.home]


def placed_devices(program: Program, devices: Sequence[Device]) -> PlacedDevices:
    """The devices that a caller names.

    Raises:
        BackendUnavailable: a device is missing or computes nothing, or no device has the memory in
            which the Program was recorded.
    """
    backends, places = [], []
    for device in devices:
        backend, index = named_backend(device)
        if not backend.capabilities.computes:
            raise BackendUnavailable(
                f"device {backend.name!r} computes nothing, so results would be wrong wherever a "
                f"launch is placed there: leave it out, or load on device={backend.name!r} alone"
            )
        backends.append(backend)
        places.append(_tensor_device(program, backend, index))
    recorded = _recorded(program)
    if recorded not in places:
        raise BackendUnavailable(
            f"devices {', '.join(map(repr, devices))}: none of them has the memory of {recorded}, "
            "on which the program was recorded: inputs and results lie there, so add a device "
            "with that memory"
        )
    is_beside = any(one.type != "cpu" for one in places)
    memories = {
        one: Memory(one, pinned=one.type == "cpu" and is_beside) for one in dict.fromkeys(places)
    }
    found = [one.name for one in backends]
    names = [f"{name}#{at}" if found.count(name) > 1 else name for at, name in enumerate(found)]
    return PlacedDevices(
        tuple(names),
        tuple(backends),
        tuple(memories[one] for one in places),
        places.index(recorded),
    )


def _recorded(program: Program) -> torch.device:
    if program.device == "cpu":
        return torch.device("cpu")
    return torch.device(program.device, _index(program.device, program.device_index))


def _index(kind: str, index: int | None) -> int:
    if index is not None:
        return index
    module: Any = torch.get_device_module(kind)
    return int(module.current_device())


def _tensor_device(program: Program, backend: Backend, index: int | None) -> torch.device:
    """The device of torch on which a device's tensors lie.

    Raises:
        BackendUnavailable: the device is missing.
    """
    kind = backend.records()
    if kind == "cpu":
        return torch.device("cpu")
    if index is None and kind == program.device:
        index = program.device_index
    backend.machine(index)  # raises, naming what is missing
    return torch.device(kind, _index(kind, index))


def measured_links(devices: PlacedDevices, hand_over_ns: float) -> dict[tuple[int, int], Link]:
    """The costs of transfers between devices: only the hand-over where they share memory.

    Between two memories two sizes are timed, copied as in executions.

    Raises:
        OutOfMemory: a device has no room for the copies.
    """
    found: dict[tuple[Memory, Memory], Link] = {}
    links = {}
    for pair in itertools.permutations(range(len(devices.memories)), 2):
        origin, target = (devices.memories[one] for one in pair)
        if origin is target:
            links[pair] = Link(SHARED_BYTES_PER_SECOND, hand_over_ns)
            continue
        if (origin, target) not in found:
            found[origin, target] = _measured(origin, target, hand_over_ns)
        links[pair] = found[origin, target]
    return links


def _measured(origin: Memory, target: Memory, hand_over_ns: float) -> Link:
    small_ns, large_ns = (_copy_ns(origin, target, one) for one in (_SMALL_BYTES, _LARGE_BYTES))
    ns_per_byte = (large_ns - small_ns) / (_LARGE_BYTES - _SMALL_BYTES)
    bytes_per_second = (
        min(1e9 / ns_per_byte, _MOST_BYTES_PER_SECOND)
        if ns_per_byte > 0
        else (_MOST_BYTES_PER_SECOND)
    )
    overhead_ns = max(0.0, small_ns - _SMALL_BYTES * 1e9 / bytes_per_second)
    return Link(bytes_per_second, overhead_ns + hand_over_ns)


def _copy_ns(origin: Memory, target: Memory, size_bytes: int) -> float:
    piece = Piece(origin.bytes(size_bytes), target.bytes(size_bytes), size_bytes)
    if origin.is_host:
        piece.source.zero_()  # unwritten pages are all the same page
    times, stream = [], stream_between(origin, target)
    for _ in range(_N_COPIES + 1):
        begin_ns = time.perf_counter_ns()
        copy_pieces(origin, target, [piece], stream)
        times.append(time.perf_counter_ns() - begin_ns)
    return statistics.median(times[1:])


def link_lines(devices: PlacedDevices, links: Mapping[tuple[int, int], Link]) -> list[str]:
    """The measured links between memories as lines for the user."""
    texts = {}
    for (one, other), link in links.items():
        origin, target = devices.memories[one], devices.memories[other]
        if origin is not target:
            texts[origin, target] = (
                f"link from {origin.device} to {target.device}: "
                f"{link.bytes_per_second / 1e9:.2f} GB/s, {link.overhead_ns / 1e3:.1f} us each"
            )
    return list(texts.values())

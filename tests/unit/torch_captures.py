"""Captures of the CUDA backend and their memory, made without a GPU.

Only what the machine lacks is replaced: torch's pools and graphs, the driver's log of nodes, and
the pool of addresses.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable

import pytest
import torch
from small_programs import program
from torch_pools import take_for_devices

from offload.backends.cuda import torch_capture, torch_pool
from offload.backends.cuda.torch_capture import _OneCapture
from offload.backends.cuda.torch_pool import PoolMemory
from offload.program import BoundProgram, Launch


class FakePool:
    """A discovery pool that torch has asked for these addresses.

    Attributes:
        error: the reason for which it has given none.
    """

    def __init__(self, *addresses: int, error: str | None = None) -> None:
        self.error = error
        self._events = [("allocate", address, 2 << 20) for address in addresses]

    @property
    def n_events(self) -> int:
        return len(self._events)

    def events(self, begin: int = 0) -> list[tuple[str, int, int]]:
        """What has happened since event `begin`."""
        return self._events[begin:]

    def add(self, kind: str, address: int, size_bytes: int = 2 << 20) -> None:
        """Note that torch has allocated or freed a block."""
        self._events.append((kind, address, size_bytes))

    def allocate(self, size_bytes: int) -> int:
        """Return new addresses."""
        address = (1 + len(self._events)) << 44
        self.add("allocate", address, size_bytes)
        return address


class FakeGraph:
    """A graph whose capture ends, with an error if one is given."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self._error = error

    def capture_end(self) -> None:
        if self._error is not None:
            raise self._error

    def reset(self) -> None:
        """Nothing of it is on a device."""


class FakeLog:
    """A log of nodes that the driver would tell of.

    Attributes:
        launches: the launch of each node, by handle.
        known: the nodes by handle.
    """

    def __init__(self, log: list[object] | None = None) -> None:
        """Begin without nodes; `log` receives "nodes" or "added nodes" at each note."""
        self.launches: dict[int, int] = {}
        self.known: dict[int, object] = {}
        self.added: set[int] = set()
        self._log = log

    def note(self, launch: Launch, *, are_added: bool = False) -> None:
        """A launch has been captured."""
        if self._log is not None:
            self._log.append("added nodes" if are_added else "nodes")


def pool_memory(monkeypatch: pytest.MonkeyPatch, pool: object) -> PoolMemory:
    """Make the memory of a capture on GPU 0, whose allocations come from `pool`."""
    take_for_devices(monkeypatch)
    _without_allocator(monkeypatch)
    return PoolMemory(pool, 0)


def one_capture(
    monkeypatch: pytest.MonkeyPatch,
    bound: BoundProgram | None = None,
    *,
    pool: object = None,
    graph: object = None,
    copied: Collection[int] = (),
    nodes: FakeLog | None = None,
    takes_devices: bool = True,
) -> _OneCapture:
    """Make a capture on GPU 0 that has not begun.

    Args:
        monkeypatch: of the test.
        bound: what is captured; None: nothing.
        pool: of addresses; None: an empty one.
        graph: what torch makes; None: one whose capture ends well. The capture is its only user.
        copied: the Values that are copied.
        nodes: the log of its nodes; None: an empty one.
        takes_devices: torch's pools are replaced; False: the test has done so.
    """
    if takes_devices:
        take_for_devices(monkeypatch)
    _without_allocator(monkeypatch)
    graphs = [FakeGraph() if graph is None else graph]
    del graph
    bound = BoundProgram(program([], [], 0)) if bound is None else bound
    pool = FakePool() if pool is None else pool
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", lambda **_: graphs.pop())
        patch.setattr(torch_capture, "NodeLog", lambda _: nodes or FakeLog())
        return _OneCapture(bound, pool, 0, types.SimpleNamespace(cuda_stream=7), set(copied))


def recorded_requests(monkeypatch: pytest.MonkeyPatch, requests: Iterable[tuple[int, int]]) -> None:
    """Let torch have recorded these requests: the address that each received, and its bytes."""
    entries: list[dict[str, object]] = [
        {"action": "alloc", "addr": at, "size": size} for at, size in requests
    ]
    if entries:
        entries.insert(1, {"action": "free_completed", "addr": entries[0]["addr"], "size": 1})
    record = {"device_traces": [entries]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: record)


def fillers_at(monkeypatch: pytest.MonkeyPatch, *addresses: int, pool: FakePool) -> list[int]:
    """Let torch serve fillers at these addresses, of new blocks where the pool has none there.

    Returns:
        The bytes of each filler, as they are asked for.
    """
    asked: list[int] = []
    left = list(addresses)

    def empty(size_bytes: int, **_: object) -> object:
        asked.append(size_bytes)
        address = left.pop(0)
        if not any(event[1] == address for event in pool.events()):
            pool.add("allocate", address)
        return types.SimpleNamespace(data_ptr=lambda: address)

    monkeypatch.setattr(torch, "empty", empty)
    return asked


def _without_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = types.SimpleNamespace(allocator=lambda: None)
    monkeypatch.setattr(torch_pool, "_pluggable", lambda: wrapper)
    monkeypatch.setattr(torch_capture, "end_capture", lambda _: None)  # without a driver

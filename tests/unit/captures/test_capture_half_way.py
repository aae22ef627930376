"""One capture with torch: what it reads, and restores if it fails half-way; needs no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from small_programs import IN, OUT, added, program
from torch_captures import FakeGraph, FakeLog, one_capture, recorded_requests

import offload
from offload.backends.captured.relocation.captures import GraphNode, NodeKind
from offload.backends.cuda import torch_capture
from offload.backends.cuda.torch_pool import PoolMemory
from offload.program import BoundProgram, Launch


class Run:
    """An eager run that takes a step in place of each launch."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.bases: dict[int, object] = {}
        self._step = step

    def call(self, launch: Launch) -> Callable[[], None]:
        return self._step


@pytest.mark.parametrize("failing", ["begin", "launch"])
def test_a_capture_that_fails_half_way_is_ended_before_anything_goes(monkeypatch, failing):
    """A stream left in capture mode would break the user's next work on it."""
    log: list[str] = []

    @contextlib.contextmanager
    def entered(name: str) -> Iterator[None]:
        log.append(f"{name} begins")
        try:
            yield
        finally:
            log.append(f"{name} ends")

    def step(name: str) -> None:
        log.append(name)
        if name == failing:
            raise offload.CaptureError(name)

    class Graph(FakeGraph):
        def capture_end(self) -> None:
            log.append("abandoned")

    for name, fake in {
        "region": lambda: entered("region"),
        "_workspaces_cleared": lambda: entered("workspaces"),
        "EagerRun": lambda *_: Run(lambda: step("launch")),
        "begin_capture": lambda *_: step("begin"),
        "generators_of": lambda *_: [],
    }.items():
        monkeypatch.setattr(torch_capture, name, fake)
    monkeypatch.setattr(PoolMemory, "current", lambda _: entered("pool"))
    bound = BoundProgram(program([IN, OUT], [added()], 1))
    one = one_capture(monkeypatch, bound, graph=Graph())
    with pytest.raises(offload.CaptureError, match=failing):
        one.run()
    made = ["begin"] if failing == "begin" else ["begin", "launch"]
    entered_as = ["region", "pool", "workspaces"]
    assert log == [
        *(f"{name} begins" for name in entered_as),
        *made,
        "abandoned",
        *(f"{name} ends" for name in reversed(entered_as)),
    ]


def test_workspaces_are_made_anew_in_a_capture_and_not_kept_after_it(monkeypatch):
    """A graph may hold no workspace that other code uses, whatever fails meanwhile."""
    log: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: log.append("cleared"), raising=False
    )

    def capture() -> None:
        log.append("captured")
        raise RuntimeError("an operator")

    with pytest.raises(RuntimeError, match="an operator"), torch_capture._workspaces_cleared():
        capture()
    assert log == ["cleared", "captured", "cleared"]


def test_nodes_are_those_that_were_read_as_they_appeared(monkeypatch):
    """The source of a copy from the host may have changed when the capture has ended."""
    known, other = (
        GraphNode(handle, NodeKind.MEMCPY, "copy", (64,), (bytes(8),)) for handle in (5, 6)
    )
    asked: list[tuple[int, object]] = []

    def read_graph(handle: int, read_before: object) -> tuple[list[GraphNode], list[object]]:
        asked.append((handle, read_before))
        return [known, other], [(0, 1)]

    class Graph(FakeGraph):
        def raw_cuda_graph(self) -> int:
            return 77

    nodes = FakeLog()
    nodes.known[5], nodes.launches[5] = known, 3
    recorded_requests(monkeypatch, [])
    for name, fake in {
        "_workspaces_cleared": contextlib.nullcontext,
        "begin_capture": lambda *_: None,
        "generators_of": lambda *_: [],
        "read_graph": read_graph,
        "_workspace_bytes": lambda device: 64 + device,
    }.items():
        monkeypatch.setattr(torch_capture, name, fake)
    monkeypatch.setattr(PoolMemory, "current", lambda _: contextlib.nullcontext())
    found, recycled = one_capture(monkeypatch, graph=Graph(), nodes=nodes).run()
    assert asked == [(77, {5: known})]
    assert found.nodes[0] is known
    assert found.launches == [3, -1]  # no launch made the second one
    assert found.workspace_bytes == 64
    assert not recycled

"""One capture with torch: what it reads, and restores if it fails half-way; needs no GPU."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

import offload
from offload.backends.cuda import torch_capture


@pytest.mark.parametrize("failing", ["begin", "launch"])
def test_a_capture_that_fails_half_way_is_ended_before_anything_goes(monkeypatch, failing):
    """A stream left in capture mode would break the user's next work on it."""
    log: list[str] = []

    class Entered:
        def __init__(self, name: str) -> None:
            self._name = name

        def __enter__(self) -> None:
            log.append(f"{self._name} begins")

        def __exit__(self, *_: object) -> None:
            log.append(f"{self._name} ends")

    def step(name: str) -> None:
        log.append(name)
        if name == failing:
            raise offload.CaptureError(name)

    monkeypatch.setattr(torch_capture, "region", lambda: Entered("region"))
    monkeypatch.setattr(torch_capture, "_workspaces_cleared", lambda: Entered("workspaces"))
    monkeypatch.setattr(torch_capture, "EagerRun", lambda *_, **__: types.SimpleNamespace(bases={}))

    class HalfWay(torch_capture._OneCapture):
        """A class of its own, which records the order in which attributes were set."""

        def __init__(self) -> None:
            self._bound = None
            self._program = types.SimpleNamespace(launches=["first"])
            self._memory = types.SimpleNamespace(current=lambda: Entered("pool"))
            self._kept = types.SimpleNamespace(bases={})
            self._stand_ins = dict
            self._launcher = types.SimpleNamespace(enqueue=None)
            self._begin = lambda: step("begin")
            self._launch = lambda run, launch: step("launch")
            self._abandon = lambda: log.append("abandoned")

    with pytest.raises(offload.CaptureError, match=failing):
        HalfWay()._captured()
    made = ["begin"] if failing == "begin" else ["begin", "launch"]
    entered = ["region", "pool", "workspaces"]
    assert log == [
        *(f"{name} begins" for name in entered),
        *made,
        "abandoned",
        *(f"{name} ends" for name in reversed(entered)),
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
    known = types.SimpleNamespace(handle=5)
    asked: list[tuple[int, object]] = []

    def read_graph(handle: int, read_before: object) -> tuple[list[object], list[object]]:
        asked.append((handle, read_before))
        return [known, types.SimpleNamespace(handle=6)], [(0, 1)]

    class Whole(torch_capture._OneCapture):
        def __init__(self) -> None:
            self._bound = None
            self._program = types.SimpleNamespace(launches=[], values=[])
            self._memory = types.SimpleNamespace(
                current=contextlib.nullcontext, allocations=lambda *_: ([], set())
            )
            self._kept = types.SimpleNamespace(bases={})
            self._graph = types.SimpleNamespace(raw_cuda_graph=lambda: 77)
            self._nodes = types.SimpleNamespace(known={5: known}, launches={5: 3})
            self._stand_ins = dict
            self._launcher = types.SimpleNamespace(enqueue=None, declared=lambda nodes: nodes)
            self._begin = self._end = lambda: None
            self._random_cells = list
            self._device = 0

    for name in ("region", "_workspaces_cleared"):
        monkeypatch.setattr(torch_capture, name, contextlib.nullcontext)
    nothing = types.SimpleNamespace(bases={})
    monkeypatch.setattr(torch_capture, "EagerRun", lambda *_, **__: nothing)
    monkeypatch.setattr(torch_capture, "weight_ranges", lambda _: [])
    monkeypatch.setattr(torch_capture, "read_graph", read_graph)
    monkeypatch.setattr(torch_capture, "_workspace_bytes", lambda device: 64 + device)
    found, recycled = Whole()._captured()
    assert asked == [(77, {5: known})]
    assert found.nodes[0] is known
    assert found.launches == [3, -1]  # no launch made the second one
    assert found.workspace_bytes == 64
    assert not recycled

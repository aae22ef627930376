"""Lanes that lack a wait, and drivers that fail: what is refused, and what is given back."""

from __future__ import annotations

import pytest

import offload
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda import graph as cuda_graph
from offload.backends.cuda import lanes as cuda_lanes

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from laned_models import DEVICE, KERNEL_NS, Towers, captured_of


@pytest.fixture
def forgetful(monkeypatch):
    """A planner that leaves out one pair of dependent launches."""
    conflicts = cuda_lanes.node_conflicts
    monkeypatch.setattr(cuda_lanes, "node_conflicts", lambda *given: conflicts(*given)[1:])


@pytest.mark.parametrize(
    ("unchecked", "message"),
    [
        ([], "nothing orders the two"),
        (["check_plan"], r"launch 0 .* and node .* of launch 1 .* may run at once"),
    ],
)
def test_lanes_without_a_wait_are_refused_before_anything_runs(
    backend, monkeypatch, forgetful, unchecked, message
):
    """By their steps; and by the edges in the driver, whatever made them."""
    for one in unchecked:
        monkeypatch.setattr(cuda_backend, one, lambda *_: None)
    with pytest.raises(offload.PlanError, match=message):
        captured_of(Towers()).load(device=DEVICE, lanes=3)


def test_the_proof_finds_lanes_that_nobody_checked(backend, monkeypatch, forgetful):
    """By the bits of the captured graph, which has its own memory."""
    for one in ("check_plan", "check_node_order"):
        monkeypatch.setattr(cuda_backend, one, lambda *_: None)
    with pytest.raises(offload.CaptureError, match="a different result at other addresses"):
        captured_of(Towers()).load(device=DEVICE, lanes=3)


def test_the_edges_that_the_driver_tells_are_those_that_are_checked(backend, monkeypatch):
    """A driver that loses an edge is found before anything runs."""
    call = cuda_graph.call

    def losing(name, *arguments):
        if name == "cuGraphAddDependencies":
            graph, *lists, count = arguments
            arguments = (graph, *(one[:-1] for one in lists), count - 1)
        return call(name, *arguments)

    monkeypatch.setattr(cuda_graph, "call", losing)
    with pytest.raises(offload.ExecutionError, match="full edges of a graph that has"):
        captured_of(Towers()).load(device=DEVICE, lanes=3)


KINDS = ("graph", "executable", "event", "mapping")


@pytest.mark.parametrize(
    "function",
    ["cuGraphClone", "cuGraphRemoveDependencies", "cuGraphAddDependencies", "cuGraphGetEdges"],
)
def test_a_driver_that_fails_leaves_nothing_behind(backend, simulator, function):
    captured = captured_of(Towers())
    captured.load(device=DEVICE).close()
    before = {kind: simulator.live(kind) for kind in KINDS}
    nth = 3 if function == "cuGraphGetEdges" else 1  # after the two of a capture
    simulator.fail(function, 1, nth=nth)
    with pytest.raises(offload.ExecutionError, match=function):
        captured.load(device=DEVICE, lanes=3)
    assert {kind: simulator.live(kind) for kind in KINDS} == before
    with captured.load(device=DEVICE, lanes=3) as run:
        assert len(run.plan.launch_lanes) == 3


def test_what_times_graphs_is_given_back(backend, simulator):
    captured = captured_of(Towers())
    captured.load(device=DEVICE).close()
    before = {kind: simulator.live(kind) for kind in KINDS}
    simulator.set_clock(kernel_ns=KERNEL_NS, copy_ns=0)
    captured.load(device=DEVICE, lanes="auto").close()
    assert {kind: simulator.live(kind) for kind in KINDS} == before

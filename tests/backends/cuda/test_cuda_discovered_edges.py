"""Edges of captured graphs: forks, and kernels that may overlap."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from prepared_graphs import no_work, prepared
from small_graphs import current_context, words

from offload.backends.cuda import graph as cuda_graph
from offload.backends.cuda.graph import call, driver_bindings


@pytest.fixture
def device(simulator):
    current_context()
    return simulator


@pytest.fixture
def pointers(device) -> int:
    """A kernel with two addresses and a number."""
    return device.kernel("add_kernel", [8, 8, 8], no_work)


def test_a_forked_graph_keeps_its_edges(device, pointers):
    def fork(at):
        event = call("cuEventCreate", 2)
        side = call("cuStreamCreate", 1)
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0))
        call("cuEventRecord", event, at.stream)
        call("cuStreamWaitEvent", side, event, 0)
        at.launch(pointers, words(at.at[1]), words(at.scratch(512)), words(1), stream=side)
        at.launch(pointers, words(at.at[1]), words(at.scratch(512)), words(2))
        call("cuEventRecord", event, side)
        call("cuStreamWaitEvent", at.stream, event, 0)

    def join(at):
        at.launch(pointers, words(at.at[1]), words(at.at[2]), words(3))

    found, _ = prepared([fork, join])
    assert set(found.graph.edges) == {(0, 1), (0, 2), (1, 3), (2, 3)}


@pytest.mark.parametrize("from_port", [1, 2])
def test_edges_of_other_ports_let_kernels_overlap(pointers, monkeypatch, from_port):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0))

    read_edges = cuda_graph._read_edges

    def with_ports(graph):
        return [(start, end, (from_port, 0, 1)) for start, end, _ in read_edges(graph)]

    monkeypatch.setattr(cuda_graph, "_read_edges", with_ports)
    found, _ = prepared([step, step])
    assert found.graph.edges == ((0, 1),)
    assert found.graph.overlapping == {(0, 1)}


@pytest.mark.parametrize("overlaps", [True, False])
def test_launches_that_may_begin_before_others_end_are_told(pointers, overlaps):
    """By the edges that the driver makes for them in a capture."""

    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0), overlaps=overlaps)

    found, _ = prepared([step, step])
    assert found.graph.edges == ((0, 1),)
    assert found.graph.overlapping == ({(0, 1)} if overlaps else set())


def test_edges_are_not_read_by_bindings_that_give_freed_memory(pointers, monkeypatch):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0))

    def freed(*_):
        raise AssertionError("before 13.3 the data of edges is garbage")

    monkeypatch.setattr(driver_bindings(), "cuGraphGetEdges", freed)
    found, _ = prepared([step, step])
    assert found.graph.edges == ((0, 1),)
    assert not found.graph.overlapping

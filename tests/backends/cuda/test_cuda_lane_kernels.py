"""Kernels on lanes that share a library's workspace, or overlap in the capture."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import pytest
import torch
from simulator import NEWEST_FIRST, RANDOM

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from aten_capturer import AtenCapturer, launch_kernel, note_node
from laned_models import DEVICE, Towers, captured_of, eager, note_graphs
from loading import ACT, IN, OUT, Device, N, on_device, result
from small_graphs import make_program, words

from offload.backends.captured.relocation.captures import Allocation
from offload.backends.cuda.graph import _read_edges
from offload.program import Operator


@pytest.fixture
def graphs(monkeypatch):
    return note_graphs(monkeypatch)


WORKSPACE_BYTES = 4096


class WorkspaceCapturer(AtenCapturer):
    """Captures an additional kernel at each product, which fills a workspace that products share.

    It writes there and reads it again after the product, like a kernel in two parts.
    """

    def __init__(self, simulator, workspace_bytes=WORKSPACE_BYTES):
        super().__init__(simulator)
        self._workspace_bytes = workspace_bytes
        self.spoiled = 0
        self._write = simulator.kernel("write_workspace", [8, 8], self._run_write)
        self._read = simulator.kernel("read_workspace", [8, 8], self._run_read)

    def _run_write(self, block):
        at, number = (int.from_bytes(block[begin : begin + 8], "little") for begin in (0, 8))
        words_at(at)[0] = number

    def _run_read(self, block):
        at, number = (int.from_bytes(block[begin : begin + 8], "little") for begin in (0, 8))
        self.spoiled += words_at(at)[0] != number

    def capture(self, bound, pool):
        self._shared = pool.allocate(WORKSPACE_BYTES)
        found = super().capture(bound, pool)
        allocations = (*found.allocations, Allocation(self._shared, WORKSPACE_BYTES, None))
        return dataclasses.replace(
            found,
            allocations=allocations,
            workspace_bytes=self._workspace_bytes,
        )

    def launch(self, stream, launch, function, sizes, block):
        """As the capturer's own, with products between two other kernels."""
        is_product = launch.name.startswith("aten::addmm")
        number = launch.index.to_bytes(8, "little")
        workspace = self._shared.to_bytes(8, "little") + number
        made = [(function, sizes, block)]
        if is_product:
            made = [(self._write, [8, 8], workspace), *made, (self._read, [8, 8], workspace)]
        for one in made:
            launch_kernel(stream, *one)
            note_node(launch)


def words_at(address):
    return (ctypes.c_uint64 * 1).from_address(address)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("order", [NEWEST_FIRST, RANDOM])
def test_each_lane_has_its_own_workspace(simulator, monkeypatch, graphs, is_known, order):
    """Or products keep their order, where memory is not declared a workspace."""
    import simulated_backend

    capturer = WorkspaceCapturer(simulator, WORKSPACE_BYTES if is_known else 0)
    backend = simulated_backend.SimulatedBackend(simulator, capturer)
    simulated_backend.install(simulator, monkeypatch, backend)
    captured = captured_of(Towers())
    simulator.set_node_order(order, 3)
    with captured.load(device=DEVICE, lanes=3) as run:
        n_lanes = len(run.plan.lanes)
        scratch = [one for one in run.program.values if one.role is offload.program.Role.SCRATCH]
        assert len(scratch) == (n_lanes if is_known else 1)
        places = {run.plan.places[one.index].offset_bytes for one in scratch}
        assert len(places) == len(scratch)
        for seed in range(4):
            simulator.set_node_order(order, seed)
            x = torch.randn(4, 16)
            torch.testing.assert_close(run(x), eager(x))
    assert capturer.spoiled == 0
    ((_, laned),) = graphs
    products = [node for node, one in enumerate(laned.nodes) if one.name == "write_workspace"]
    starts = {other for _, other in laned.edges}
    # With separate workspaces the first products of the towers wait for nothing.
    assert len([one for one in products if one not in starts]) == (n_lanes if is_known else 1)


def test_lanes_have_full_edges_where_the_capture_had_some_with_data(simulator, monkeypatch, graphs):
    """Work of a kernel before its wait is then done after all predecessors have ended."""
    device = Device(simulator, monkeypatch)
    roles = [(IN, N), (ACT, N), (ACT, N), (OUT, N)]
    made = make_program(roles, [("0", "1"), ("0", "2"), ("12", "3")])
    launches = tuple(
        dataclasses.replace(one, callee=Operator("aten::sin")) for one in made.launches
    )
    made = dataclasses.replace(made, launches=launches)

    def scaled(source, target, factor):
        number = struct.pack("<f", factor)
        return lambda at: at.launch(
            device.scale, words(at.at[source]), words(at.at[target]), number, overlaps=True
        )

    def added(at):
        at.launch(device.add, *(words(at.at[one]) for one in (1, 2, 3)), overlaps=True)

    steps = [scaled(0, 1, 2.0), scaled(0, 2, 3.0), added]
    run = device.load(made, steps, lanes=2)
    ((before, after),) = graphs
    assert [node.overlaps for node in before.nodes] == [(), (0,), (1,)]
    assert set(after.edges) == {(0, 2), (1, 2)}
    assert all(not any(ports) for *_, ports in _read_edges(after.graph))
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x * 2 + x * 3)

"""Launches on lanes of a CUDA graph: `load(lanes=)` on the simulated driver. No GPU has run it."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from simulator import NEWEST_FIRST, OLDEST_FIRST, RANDOM
from torch import nn

import offload
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda import graph as cuda_graph
from offload.backends.cuda import lanes as cuda_lanes

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from aten_capturer import AtenCapturer, launch_kernel, note_node
from loading import ACT, IN, OUT, Device, N, on_device, result
from small_graphs import make_program, words

from offload.backends.captured.relocation.captures import Allocation
from offload.backends.cuda.graph import _read_edges
from offload.program import Operator

DEVICE = "cuda-simulated"
KERNEL_NS = 10_000


class Towers(nn.Module):
    """Independent branches of an input, and their sum."""

    def __init__(self, n_towers=3, depth=3):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16, 16), nn.Tanh()) * depth) for _ in range(n_towers)
        )

    def forward(self, x):
        return sum(tower(x) for tower in self.towers)


class Heads(nn.Module):
    """Heads of different lengths, one of which writes a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += self.first(x).mean(0)
        return {"a": self.second(x).relu().sin().cos(), "b": self.third(x) + self.seen}


class Chain(nn.Module):
    """No two launches can overlap."""

    def forward(self, x):
        return x.sin().cos().tanh()


def captured_of(model, seed=0):
    torch.manual_seed(seed)
    model = model.eval()
    return offload.capture(model, torch.randn(4, 16))


def eager(x):
    """The results of the towers of `captured_of`."""
    torch.manual_seed(0)
    with torch.no_grad():
        return Towers().eval()(x)


@pytest.fixture
def graphs(monkeypatch):
    """The edges of each graph with lanes."""
    found = []
    with_edges = cuda_lanes._with_edges

    def note(capture, edges):
        laned = with_edges(capture, edges)
        found.append((capture, laned))
        return laned

    monkeypatch.setattr(cuda_lanes, "_with_edges", note)
    return found


@pytest.mark.parametrize("model", [Towers, Heads])
@pytest.mark.parametrize("order", [NEWEST_FIRST, OLDEST_FIRST, RANDOM])
def test_lanes_give_the_bits_of_one_lane(backend, simulator, graphs, model, order):
    """In any order of what edges leave open, at any addresses."""
    captured = captured_of(model())
    x = [torch.randn(4, 16) for _ in range(6)]
    begin = [one.clone() for one in written_weights(captured)]
    with captured.load(device=DEVICE) as run:
        expected = [run(one) for one in x]
    end = [one.clone() for one in written_weights(captured)]
    for one, content in zip(written_weights(captured), begin, strict=True):
        one.copy_(content)
    with captured.load(device=DEVICE, lanes=3) as run:
        assert len(run.plan.launch_lanes) > 1
        ((before, after),) = graphs
        assert set(after.edges) != set(before.edges)
        for number, one in enumerate(x):
            simulator.set_node_order(order, number)
            given = torch.full((run.feature_map_bytes + 256,), 0xA5, dtype=torch.uint8)
            memory = given[-given.data_ptr() % 256 :] if number % 2 else None
            found = run(one, feature_map=memory)
            torch.testing.assert_close(found, expected[number], rtol=0, atol=0)
    for one, content in zip(written_weights(captured), end, strict=True):
        assert torch.equal(one, content)


def written_weights(captured):
    bound = captured.bound
    written = {value for launch in bound.program.launches for value in launch.writes}
    for index, holders in bound.bindings.weights.items():
        if index in written:
            yield holders[0]


def test_values_on_several_lanes_share_memory_where_they_cannot_meet(backend, graphs):
    captured = captured_of(Towers(depth=4))
    with captured.load(device=DEVICE) as one, captured.load(device=DEVICE, lanes=3) as laned:
        assert one.feature_map_bytes < laned.feature_map_bytes
        assert laned.feature_map_bytes < laned.memory_report().unshared_bytes


def test_the_driver_has_the_edges_that_were_planned_and_no_other(backend, graphs):
    captured = captured_of(Towers())
    with captured.load(device=DEVICE, lanes=4):
        ((_, laned),) = graphs
        handles = [node.handle for node in laned.nodes]
        told = {
            (handles.index(one), handles.index(other)) for one, other, _ in _read_edges(laned.graph)
        }
        assert told == set(laned.edges)


def test_auto_takes_lanes_where_the_device_is_quicker(backend, simulator, graphs):
    simulator.set_clock(kernel_ns=KERNEL_NS, copy_ns=0)
    captured = captured_of(Towers())
    with captured.load(device=DEVICE, lanes="auto") as run:
        assert len(run.plan.launch_lanes) > 1
        text = run.explain()
        x = torch.randn(4, 16)
        torch.testing.assert_close(run(x), eager(x))
    n_launches = len(captured.program.launches)
    assert f"{n_launches * KERNEL_NS / 1e3:,.1f} us on one lane" in text
    assert "launches run on 3 lanes" in text or "launches run on 4 lanes" in text
    assert "measured" in text


def test_auto_keeps_one_lane_where_the_device_is_no_quicker(backend, simulator, graphs):
    simulator.set_clock(kernel_ns=0, copy_ns=0)
    with captured_of(Towers()).load(device=DEVICE, lanes="auto") as run:
        assert run.plan.launch_lanes is None
        assert "launches run on one lane: several lanes are no quicker" in run.explain()


def test_auto_says_that_a_chain_has_one_lane(backend, graphs):
    with captured_of(Chain()).load(device=DEVICE, lanes="auto") as run:
        assert run.plan.launch_lanes is None
        assert "launches run on one lane: several lanes gain nothing" in run.explain()
    assert graphs == []


def test_auto_that_may_execute_nothing_keeps_one_lane(backend, graphs):
    with captured_of(Towers()).load(device=DEVICE, lanes="auto", verify=False) as run:
        assert run.plan.launch_lanes is None
        assert "load(verify=False) executes nothing" in run.explain()


def test_a_number_of_lanes_needs_no_proof(backend):
    captured = captured_of(Towers())
    with captured.load(device=DEVICE, lanes=2, verify=False) as run:
        assert len(run.plan.launch_lanes) == 2
        x = torch.randn(4, 16)
        torch.testing.assert_close(run(x), eager(x))


def test_one_lane_is_as_if_nothing_was_said(backend, graphs):
    with captured_of(Towers()).load(device=DEVICE, lanes=1) as run:
        assert "lane" not in run.explain()
    assert graphs == []


@pytest.mark.parametrize("lanes", [0, 65, True, "three", 2.0])
def test_what_is_no_number_of_lanes_is_refused(backend, lanes):
    with pytest.raises(offload.BindingError, match="lanes: expected a number from 1 to 64"):
        captured_of(Chain()).load(device=DEVICE, lanes=lanes)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"scheduling": "host"}, offload.BindingError, "the host delivers launches"),
        ({"device": "null"}, offload.BackendUnavailable, "'null' orders launches by itself"),
        ({"weights_budget": "1GiB"}, offload.BindingError, "weights are brought as launches"),
    ],
)
def test_what_excludes_lanes_is_refused_and_auto_says_so(backend, options, error, why):
    captured = captured_of(Towers())
    options = {"device": DEVICE, **options}
    with pytest.raises(error, match=why):
        captured.load(**options, lanes=2)
    if "weights_budget" not in options:  # which takes weights in files on this device
        with captured.load(**options, lanes="auto") as run:
            assert why.strip("'") in run.explain()


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


@pytest.mark.parametrize(
    "function",
    ["cuGraphClone", "cuGraphRemoveDependencies", "cuGraphAddDependencies", "cuGraphGetEdges"],
)
def test_a_driver_that_fails_leaves_nothing_behind(backend, simulator, function):
    captured = captured_of(Towers())
    captured.load(device=DEVICE).close()
    before = {kind: simulator.live(kind) for kind in ("graph", "executable", "event", "mapping")}
    nth = 3 if function == "cuGraphGetEdges" else 1  # after the two of a capture
    simulator.fail(function, 1, nth=nth)
    with pytest.raises(offload.ExecutionError, match=function):
        captured.load(device=DEVICE, lanes=3)
    after = {kind: simulator.live(kind) for kind in ("graph", "executable", "event", "mapping")}
    assert after == before
    with captured.load(device=DEVICE, lanes=3) as run:
        assert len(run.plan.launch_lanes) == 3


def test_what_times_graphs_is_given_back(backend, simulator):
    captured = captured_of(Towers())
    captured.load(device=DEVICE).close()
    before = {kind: simulator.live(kind) for kind in ("graph", "executable", "event", "mapping")}
    simulator.set_clock(kernel_ns=KERNEL_NS, copy_ns=0)
    captured.load(device=DEVICE, lanes="auto").close()
    after = {kind: simulator.live(kind) for kind in ("graph", "executable", "event", "mapping")}
    assert after == before


# ---- a library's workspace --------------------------------------------------------------------

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


def test_what_is_told_of_a_plan_has_its_lanes(backend, monkeypatch, tmp_path):
    """The folder of a load, and a timeline."""
    monkeypatch.setenv("OFFLOAD_DUMP", str(tmp_path))
    with captured_of(Towers()).load(device=DEVICE, lanes=3) as run:
        x = torch.randn(4, 16)
        with run.timeline() as timeline:
            torch.testing.assert_close(run(x), eager(x))
    assert len(timeline.executions) == 1
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.suffix in {".txt", ".json"}]
    steps = [text for text in texts if "lane launches 0:" in text]
    assert any(text.count("lane launches ") == 3 for text in steps)
    assert any("wait for event" in text for text in steps)


# ---- kernels that may overlap -----------------------------------------------------------------


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


# ---- random programs --------------------------------------------------------------------------


@st.composite
def recipes(draw):
    """Steps of a program on vectors: the operation of each, and its earlier operands."""
    steps = []
    for number in range(draw(st.integers(3, 14))):
        kind = draw(st.sampled_from(["sin", "add", "mul_", "view", "sum", "buffer_"]))
        first, second = (draw(st.integers(0, number)) for _ in range(2))
        steps.append((kind, first, second))
    return steps, draw(st.lists(st.integers(0, len(steps)), min_size=1, max_size=3, unique=True))


class Recipe(nn.Module):
    """Executes a recipe; some steps write in place, others view a part of a Value."""

    def __init__(self, recipe):
        super().__init__()
        self.steps, self.returned = recipe
        self.register_buffer("state", torch.zeros(16))

    def forward(self, x):
        known = [x]
        for kind, first, second in self.steps:
            one, other = known[first], known[second]
            if kind == "sin":
                known.append(one.sin())
            elif kind == "add":
                known.append(one + other)
            elif kind == "mul_":
                copy = one.clone()
                copy[:8].mul_(other[8:].cos())
                known.append(copy)
            elif kind == "view":
                known.append(one.view(4, 4).t().reshape(16))
            elif kind == "sum":
                known.append(one.sum() + other)
            else:
                self.state.add_(one)
                known.append(self.state * 0.5)
        return [known[index] for index in self.returned]


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(recipes(), st.integers(2, 5))
def test_random_programs_on_lanes_give_what_eager_gives(backend, simulator, recipe, n_lanes):
    """In random orders of what edges leave open, with activations in poisoned memory."""
    model = Recipe(recipe).eval()
    torch.manual_seed(1)
    captured = offload.capture(model, torch.randn(16))
    with captured.load(device=DEVICE, lanes=n_lanes) as run:
        event(f"{max(1, len(run.plan.lanes))} lanes")
        for seed in range(3):
            simulator.set_node_order(RANDOM, seed)
            x = torch.randn(16)
            before = model.state.clone()
            with torch.no_grad():
                expected = [one.clone() for one in model(x.clone())]
            after = model.state.clone()
            model.state.copy_(before)
            given_map = torch.full((run.feature_map_bytes + 256,), 0x7F, dtype=torch.uint8)
            found = run(x.clone(), feature_map=given_map[-given_map.data_ptr() % 256 :])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert torch.equal(model.state, after)

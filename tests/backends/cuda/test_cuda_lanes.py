"""Launches on lanes of a CUDA graph: `load(lanes=)` on the simulated driver. No GPU has run it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from simulator import NEWEST_FIRST, OLDEST_FIRST, RANDOM
from torch import nn

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from laned_models import DEVICE, KERNEL_NS, Towers, captured_of, eager, note_graphs

from offload.backends.cuda.graph import _read_edges


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


@pytest.fixture
def graphs(monkeypatch):
    return note_graphs(monkeypatch)


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
        ({"weights_budget": "1GiB"}, offload.BindingError, "weights are streamed as launches"),
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

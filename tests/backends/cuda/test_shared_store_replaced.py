"""New content of weights while executables share the store, on the simulated CUDA driver."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pytest
import torch
from device_streaming import GIVEN, ORDERS, CudaDevice, check, expected_of, floor_on
from shared_stores import file_weights, headed_in, load, other_weights
from stored import save_weights, without_memory
from torch import nn

import offload
from offload.api.captured import Captured
from offload.program import StoredTensor

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

WIDTH = 128


@pytest.fixture
def cuda(simulator, small_granules, monkeypatch) -> CudaDevice:
    device = CudaDevice(simulator, monkeypatch)
    simulator.set_clock(1000, 700)
    return device


@pytest.fixture
def headed(tmp_path) -> Captured:
    return headed_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("back", ["tensors", "files"])
def test_each_has_its_content_whichever_graph_runs(
    order, eager, back, cuda, simulator, headed, tmp_path
):
    """Where the content moves, the timed graph is made anew, and the other one follows."""
    budget = floor_on(headed, cuda.backend)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    new, again = other_weights(tmp_path, inputs[0])
    first, second = expected_of(headed, inputs), expected_of(again, inputs)
    places = {one.name: one for one in headed.bindings.stored.values()}
    old = places if back == "files" else file_weights(headed)

    def settle(_run: offload.Executable) -> None:
        cuda.synchronize()

    gc.collect()
    before = cuda.held()
    with load(headed, cuda, budget) as one, load(headed, cuda, budget) as other:
        cuda.set_order(order)
        simulator.set_eager(eager)
        with one.timeline(), other.timeline():
            check(one, inputs, first, settle)
            check(other, inputs, first, settle)
            one.streaming.replace(new)
            check(one, inputs[:1], second[:1], settle)
            check(other, inputs, first, settle)
            check(one, inputs, second, settle)
            one.streaming.replace(old)
            check(one, inputs, first, settle)
            check(other, inputs, first, settle)
        check(one, inputs, first, settle)
        check(other, inputs, first, settle)
    gc.collect()
    assert cuda.held() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", ["cuGraphExecMemcpyNodeSetParams", "cuGraphMemcpyNodeSetParams"]
)
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("is_timed", [True, False], ids=["timed", "plain"])
def test_content_that_goes_back_after_nodes_were_set_by_half(
    function, nth, is_timed, cuda, simulator, headed, tmp_path
):
    budget = floor_on(headed, cuda.backend)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    new, _ = other_weights(tmp_path, inputs[0])
    first = expected_of(headed, inputs)
    places = {one.name: one for one in headed.bindings.stored.values()}

    def settle(_run: offload.Executable) -> None:
        cuda.synchronize()

    with load(headed, cuda, budget) as one, load(headed, cuda, budget) as other:
        with one.timeline() if is_timed else contextlib.nullcontext():
            check(one, inputs, first, settle)
            check(other, inputs, first, settle)
            one.streaming.replace(new)
            simulator.fail(function, 999, nth)
            with pytest.raises(offload.ExecutionError, match="read its new content"):
                one(inputs[0])
            one.streaming.replace(places)
            check(one, inputs, first, settle)
            check(one, inputs, first, settle)
            check(other, inputs, first, settle)
        with one.timeline():
            check(one, inputs, first, settle)


class Stacked(nn.Module):
    """One weight has two matrices of the other model's size."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.more = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.matmul(x, self.both), self.more) @ self.last


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def captured_with(folder: Path, model: nn.Module, given: torch.Tensor) -> Captured:
    folder.mkdir()
    save_weights(model, folder)
    return offload.capture(without_memory(type(model)), given, weights=folder)


def test_a_weight_that_moves_inside_of_one_range_follows(cuda, tmp_path):
    """Both halves of one piece of another executable's memory, one after the other."""
    stacked, layers = Stacked().eval(), Layers().eval()
    given = torch.randn(4, WIDTH)
    owner = captured_with(tmp_path / "stacked", stacked, given)
    user = captured_with(tmp_path / "layers", layers, given)
    place = next(one for one in owner.bindings.stored.values() if one.name == "both")
    half_bytes = WIDTH * WIDTH * 4
    with (
        owner.load(cuda.backend.name, weights_budget=floor_on(owner, cuda.backend)) as one,
        user.load(cuda.backend.name, weights_budget=floor_on(user, cuda.backend)) as other,
    ):
        plan = other.streaming.plan
        name = user.bindings.stored[plan.pieces[plan.transfers[0].piece].value].name
        held = one.streaming.store_bytes
        assert held >= 2 * half_bytes
        for half in (0, 1, 0):
            at = place.offset_bytes + half * half_bytes
            halved = StoredTensor("half", place.path, at, half_bytes, (WIDTH, WIDTH), "float32")
            other.streaming.replace({name: halved})
            layers.state_dict()[name].copy_(stacked.both[half].detach())
            with torch.no_grad():
                wanted = layers(given)
            result = other(given)
            cuda.synchronize()
            assert torch.equal(result, wanted)
            assert other.streaming.shared_store_bytes == half_bytes

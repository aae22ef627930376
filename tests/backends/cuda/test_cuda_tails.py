"""Weights whose head stays on a CUDA device and whose tail is streamed, mapped contiguously."""

from __future__ import annotations

import gc

import pytest
import safetensors.torch
import torch
from budgets import Deep, weight_bytes
from stored import save_weights, without_memory
from torch import nn

import offload
from offload.console.amounts import show_bytes

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from device_streaming import (
    GIVEN,
    ORDERS,
    check,
    expected_of,
    floor_on,
    poison_after_last_use,
    unmapped,
)
from streamed_tails import GRANULE, KIB, held, tails_of

pytestmark = pytest.mark.usefixtures("small_granules")


def rounded(n_bytes: int, unit: int = GRANULE) -> int:
    return -(-n_bytes // unit) * unit


@pytest.mark.slow
def test_every_budget_gives_the_same_bits_and_takes_what_is_planned(
    backend, simulator, deep, device_floor
):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs * len(ORDERS))
    whole = weight_bytes(deep.program)
    n_cut = 0
    for given_bytes in (device_floor, *range(device_floor, whole, (whole - device_floor) // 5)):
        gc.collect()  # an earlier load's leftovers would share its arena
        before = simulator.physical_bytes, simulator.host_bytes
        with deep.load(backend.name, weights_budget=given_bytes, verify=False) as run:
            plan = run.streaming.plan
            n_cut += bool(tails_of(plan))
            assert plan.granule_bytes == GRANULE
            assert plan.taken_bytes <= given_bytes
            streamed = [one.size_bytes for one in plan.pieces if one.streamed]
            assert sum(streamed) == whole - plan.resident_bytes
            taken = simulator.physical_bytes - before[0]
            arena = rounded(run.feature_map_bytes)
            assert taken == plan.taken_bytes + arena
            assert f"{show_bytes(plan.taken_bytes)} used" in run.streaming.explain()
            stored = sum(rounded(size_bytes, 4096) for size_bytes in streamed)
            assert simulator.host_bytes - before[1] == stored
            for number, order in enumerate(ORDERS):
                simulator.set_node_order(*order)
                copied = simulator.bytes_from_host
                moved = run.streaming.bytes_moved
                check(run, inputs, expected[number * len(inputs) :][: len(inputs)])
                assert run.last_execution.bytes_streamed == plan.transfer_bytes
                n_bytes = simulator.bytes_from_host - copied
                assert n_bytes == run.streaming.bytes_moved - moved
                if number:  # the first execution has a prologue
                    assert n_bytes == len(inputs) * plan.transfer_bytes
    assert n_cut >= 3


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_tails_are_poisoned_after_their_last_use(order, backend, simulator, deep, budget):
    """The memory that other weights also map, through the addresses of the weight that was read."""
    inputs = [torch.randn(*GIVEN) for _ in range(4)]
    expected = expected_of(deep, inputs)
    simulator.set_node_order(*order)
    with deep.load(backend.name, weights_budget=budget) as run:
        poison_after_last_use(backend, run)
        check(run, inputs, expected)


def test_a_granule_of_the_device_is_kept_to(backend, simulator, tmp_path):
    """2 MiB, as on devices: each weight is three of them, and some bytes more."""
    simulator.set_granularity(2 * 2**20)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1280, 1280, bias=False) for _ in range(6)))

    save_weights(build().eval(), tmp_path)
    given = torch.randn(1, 1280)
    captured = offload.capture(without_memory(build), given, weights=tmp_path)
    expected = expected_of(captured, [given] * 2)
    whole = weight_bytes(captured.program)
    assert whole // 6 % (2 * 2**20)
    before = simulator.physical_bytes
    budget = whole - 3 * 2**20
    with captured.load(backend.name, weights_budget=budget, verify=False) as run:
        plan = run.streaming.plan
        assert plan.granule_bytes == 2 * 2**20
        assert tails_of(plan)
        for piece in tails_of(plan):
            assert piece.offset_bytes % (2 * 2**20) == 0
            assert piece.memory_offset_bytes % (2 * 2**20) == 0
        arena = rounded(run.feature_map_bytes, 2 * 2**20)
        assert simulator.physical_bytes - before == plan.taken_bytes + arena
        assert budget - 2 * 2**20 < plan.taken_bytes <= budget
        check(run, [given] * 2, expected)


def test_less_than_a_granule_is_no_budget(backend, simulator, deep):
    """A device that allocates 2 MiB at a time takes them for a smaller model: that is the floor."""
    simulator.set_granularity(2 * 2**20)
    whole = weight_bytes(deep.program)
    assert whole < 2 * 2**20
    with pytest.raises(offload.PlanError, match=r"at least 2097152 bytes.* gives .* by 2097152"):
        deep.load(backend.name, weights_budget=whole, verify=False)
    gc.collect()
    for budget in (None, 2 * 2**20, 3 * 2**20, "auto"):
        before = simulator.physical_bytes
        with deep.load(backend.name, weights_budget=budget, verify=False) as run:
            plan = run.streaming.plan
            assert plan.is_resident
            arena = rounded(run.feature_map_bytes, 2 * 2**20)
            assert simulator.physical_bytes - before == plan.taken_bytes + arena
            assert plan.taken_bytes == plan.floor.required_bytes == 2 * 2**20


def test_at_the_same_floor_less_is_copied_than_of_whole_weights(backend, headed, monkeypatch):
    """No floor is lower: all operands of a launch are resident as a whole."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(headed, inputs)
    floor = floor_on(headed, backend)
    assert 1024 * 128 * 4 <= floor <= 1024 * 128 * 4 + 64 * KIB
    with headed.load(backend.name, weights_budget=floor) as run:
        mapped = run.streaming.plan
        check(run, inputs, expected)
    monkeypatch.setattr(type(backend.weights), "memory_layout", unmapped(backend))
    assert floor_on(headed, backend) == floor
    with headed.load(backend.name, weights_budget=floor) as run:
        whole = run.streaming.plan
        check(run, inputs, expected)
    assert tails_of(mapped)
    assert not tails_of(whole)
    assert whole.transfer_bytes == weight_bytes(headed.program)
    assert mapped.transfer_bytes <= 7 * 64 * KIB  # the small ones, and as much of the large one
    assert mapped.period_ns < whole.period_ns


class Sliced(nn.Module):
    """Launches that hold addresses inside weights: in their heads and in their tails."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(512, 128)) for _ in range(6))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            low = nn.functional.linear(given, weight[:128])
            high = nn.functional.linear(given, weight[384:].clone())
            given = torch.tanh(low + high + weight[511])
        return given


def test_addresses_inside_of_tails_are_relocated(backend, simulator, tmp_path):
    save_weights(Sliced().eval(), tmp_path)
    captured = offload.capture(without_memory(Sliced), torch.randn(*GIVEN), weights=tmp_path)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(captured, inputs)
    budget = weight_bytes(captured.program) * 2 // 3
    with captured.load(backend.name, weights_budget=budget) as run:
        # Rows from 384 on, in bytes of which some, or all, are of a tail.
        assert any(piece.offset_bytes <= 448 * 512 for piece in tails_of(run.streaming.plan))
        poison_after_last_use(backend, run)
        check(run, inputs, expected)


def test_heads_and_tails_are_replaced_and_read_again(backend, deep, budget, tmp_path):
    given = torch.randn(*GIVEN)
    first = expected_of(deep, [given])
    path = tmp_path / "model.safetensors"
    other = Deep().eval()
    (tmp_path / "other").mkdir()
    save_weights(other, tmp_path / "other")
    again = offload.capture(without_memory(Deep), given, weights=tmp_path / "other")
    second = expected_of(again, [given] * 2)
    with deep.load(backend.name, weights_budget=budget) as run:
        check(run, [given], first)
        new = {name: one.detach().clone() for name, one in other.state_dict().items()}
        run.streaming.replace(new)
        for tensor in new.values():
            tensor.fill_(float("nan"))  # a copy was taken
        check(run, [given] * 2, second)
    with deep.load(backend.name, weights_budget=budget) as run:
        check(run, [given], first)
        changed = {name: one * 2 for name, one in safetensors.torch.load_file(path).items()}
        with path.open("r+b") as file:
            file.write(safetensors.torch.save(changed))
        third = expected_of(deep, [given] * 2)
        run.streaming.refresh()
        check(run, [given] * 2, third)


@pytest.mark.slow
def test_two_executables_have_memories_of_their_own(backend, simulator, deep, budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 3)
    before = held(simulator)
    with (
        deep.load(backend.name, weights_budget=budget) as one,
        deep.load(backend.name, weights_budget=budget + 64 * KIB) as other,
    ):
        for (wanted,) in expected:
            assert torch.equal(one(given), wanted)
            assert torch.equal(other(given), wanted)
    del one, other
    assert held(simulator) == before


def test_host_scheduling_copies_tails_alike(backend, deep, budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 2)
    with deep.load(backend.name, weights_budget=budget, scheduling="host") as run:
        check(run, [given] * 2, expected)
        assert run.last_execution.bytes_streamed == run.streaming.plan.transfer_bytes


def test_auto_takes_what_is_free(backend, simulator, deep, device_floor):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given])
    whole = weight_bytes(deep.program)
    with deep.load(backend.name, weights_budget=device_floor, verify=False) as run:
        other_bytes = simulator.physical_bytes - run.streaming.plan.memory_bytes
    room = (device_floor + whole) // 2
    simulator.set_memory_limit(other_bytes + room)
    with deep.load(backend.name, weights_budget="auto", verify=False) as run:
        assert tails_of(run.streaming.plan)
        assert device_floor < run.streaming.plan.memory_bytes <= room
        check(run, [given], expected)

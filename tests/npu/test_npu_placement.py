"""A Program recorded on the CPU, placed on the CPU and on an NPU with its own memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_simulator import AscendSimulator
from copies import before_copies, fail_nth
from on_npu import check_same
from torch import nn

import offload
from offload.backends import CpuBackend
from offload.load import device_times
from offload.load import devices as device_loading
from offload.run.placed_executable import PlacedExecutable


class Exact(nn.Module):
    """Integers whose sums have the same bits in any order and precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-3, 4, (8, 8)).float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        first = x @ self.weight
        left, right = first.relu(), first * 2
        return left @ self.weight + right + torch.ones(8), left


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


def let_launches_take(monkeypatch: pytest.MonkeyPatch, costs_ns: Callable[[int, int], Any]) -> None:
    """Set durations of launches on each device (None: it cannot run there); calls are not timed."""

    def launch_ns(self: Any, at: int) -> list[Any]:
        return [costs_ns(at, index) for index in range(len(self.bound.program.launches))]

    monkeypatch.setattr(device_times.DeviceTimes, "launch_ns", launch_ns)
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)


def placed(
    monkeypatch: pytest.MonkeyPatch, captured: Any, where: Any, device: Any = "npu"
) -> PlacedExecutable:
    """Launches on given devices: 0 the CPU, 1 the NPU."""
    let_launches_take(monkeypatch, lambda at, index: 1e3 if where[index] == at else None)
    found: PlacedExecutable = captured.load([CpuBackend(threads=1), device])
    return found


def test_every_placement_of_a_small_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Exact()
    captured = offload.capture(model, numbers(4, 8))
    names = [one.name for one in captured.program.launches]
    n_launches, n_there = len(names), 0
    for where in itertools.product((0, 1), repeat=n_launches):
        with placed(monkeypatch, captured, where) as run:
            planned = {one.costs.planned for one in run.segments}
            n_there += 1 in planned
            inputs = [numbers(4, 8) for _ in range(2)]
            for x in inputs:
                found, expected = run(x), model(x)
                assert all(one.device.type == "cpu" for one in found)
                assert all(map(torch.equal, found, expected)), where
            tickets = [run.submit(x) for x in inputs]
            for x, ticket in zip(inputs, tickets, strict=True):
                assert all(map(torch.equal, ticket.result(), model(x))), where
    assert n_there == 2**n_launches - 1


def test_random_placements_of_a_larger_program(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        *(one for _ in range(6) for one in (nn.Linear(16, 16), nn.ReLU()))
    ).requires_grad_(False)
    for one in model.parameters():
        one.copy_(torch.randint(-1, 2, one.shape))
    captured = offload.capture(model, numbers(4, 16))
    n_launches = len(captured.program.launches)
    for _ in range(6):
        where = torch.randint(2, (n_launches,)).tolist()
        with placed(monkeypatch, captured, where) as run:
            batches = [numbers(4, 16) for _ in range(5)]
            results = run.map(batches, buffersize=3)
            for x, y in zip(batches, results, strict=True):
                assert torch.equal(y, model(x))


def test_launches_are_timed_and_placed(simulated_npu: AscendSimulator) -> None:
    model = Exact()
    captured = offload.capture(model, numbers(4, 8))
    with captured.load(["cpu", "npu"]) as run:
        assert all(None not in one.costs_ns for one in run.placement.graph.tasks[:-2])
        assert "link from cpu to npu:0" in run.explain()
        for _ in range(3):
            x = numbers(4, 8)
            assert all(map(torch.equal, run(x), model(x)))


@pytest.mark.parametrize("placement", ["hybrid", "dynamic"])
def test_segments_move_between_memories(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_launches_take(monkeypatch, lambda at, index: 1e3 if index % 2 == at else 2e3)
    model = Exact()
    captured = offload.capture(model, numbers(4, 8))
    with captured.load(["cpu", "npu"], placement=placement) as run:
        assert all(None not in one.runs for one in run.segments)
        n_segments = len(run.segments)
        for devices in itertools.product((0, 1), repeat=n_segments):
            with monkeypatch.context() as patch:
                patch.setattr(run.choice, "choose", lambda devices=devices: devices)
                for _ in range(2):
                    x = numbers(4, 8)
                    assert all(map(torch.equal, run(x), model(x))), devices


def test_what_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, written buffers, host reads, and an operator that the device lacks."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x.sum(0))
            kept = (x * 2 + torch.bernoulli(torch.full((4, 8), 0.5))).relu()
            return torch.special.airy_ai(kept) * self.count + kept.mul(3)

    let_launches_take(monkeypatch, lambda at, index: 1e6 if at == 0 else 1e3)
    model, twin = Mixed(), Mixed()
    captured = offload.capture(model, numbers(4, 8))
    model.count.zero_()
    with captured.load(["cpu", "npu"]) as run:
        assert "aten::special_airy_ai has no kernel on npu" in run.explain()
        there = {
            launch.name
            for one in run.segments
            if one.costs.planned == 1
            for launch in one.slice.bound.program.launches
        }
        assert {"aten::mul.Tensor", "aten::relu"} <= there
        for _ in range(3):
            x = numbers(4, 8)
            state = torch.get_rng_state()
            found = run(x)
            torch.set_rng_state(state)
            expected = twin(x)
            check_same(found, expected)
            assert torch.equal(model.count, twin.count)


def test_a_weight_that_is_written_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Exact()
    captured = offload.capture(model, numbers(4, 8))
    n_launches = len(captured.program.launches)
    with placed(monkeypatch, captured, [1] * n_launches) as run:
        for step in range(3):
            x = numbers(4, 8)
            tickets = [run.submit(x) for _ in range(3)]
            for ticket in tickets:
                assert all(map(torch.equal, ticket.result(), model(x)))
            model.weight.add_(step + 1)
        model.weight.data = numbers(8, 8)
        with pytest.raises(offload.BindingError, match=r"call run\.rebind_weights"):
            run(x)
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))


def test_a_program_of_the_npu_with_segments_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Exact()
    twin = Exact()
    twin.load_state_dict(model.state_dict())
    twin = twin.npu()

    def ones(x: torch.Tensor) -> Any:
        first = x @ twin.weight
        return first.relu() @ twin.weight + torch.ones(8, device=x.device), first

    captured = offload.capture(ones, numbers(4, 8).npu())
    n_launches = len(captured.program.launches)
    let_launches_take(
        monkeypatch, lambda at, index: 1e3 if (index < n_launches // 2) == (at == 0) else None
    )
    with captured.load([CpuBackend(threads=1), "npu"]) as run:
        assert {one.costs.planned for one in run.segments} == {0, 1}
        for _ in range(3):
            x = numbers(4, 8).npu() * 1
            found, expected = run(x), ones(x)
            assert all(one.device.type == "npu" for one in found)
            assert all(
                torch.equal(one.cpu(), other.cpu())
                for one, other in zip(found, expected, strict=True)
            )
            ticket = run.submit(x + 1)
            for one, other in zip(ticket.result(), ones(x + 1), strict=True):
                assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_after_a_copy_that_failed_the_device_is_refused(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is left alone: torch_npu would launch nothing any more."""
    model, x = Exact(), numbers(4, 8)
    captured = offload.capture(model, x)
    n_launches = len(captured.program.launches)
    with placed(monkeypatch, captured, [index % 2 for index in range(n_launches)]) as run:
        run(x)
        with (
            before_copies(fail_nth(nth)),
            pytest.raises(offload.ExecutionError, match=r"copying .* failed: the link is down"),
        ):
            run(x)
        with pytest.raises(offload.ExecutionError, match="npu:0 failed in an earlier copy"):
            run(x)
        with pytest.raises(offload.ExecutionError, match="npu:0 failed in an earlier copy"):
            run.submit(x)
    with placed(monkeypatch, captured, [1] * n_launches) as run:
        assert all(map(torch.equal, run(x), model(x)))


@pytest.mark.parametrize("nth", [1, 2])
def test_a_launch_that_fails_on_the_device(
    nth: int, simulated_npu: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Exact(), numbers(4, 8)
    captured = offload.capture(model, x)
    n_launches = len(captured.program.launches)
    with placed(monkeypatch, captured, [index % 2 for index in range(n_launches)]) as run:
        run(x)
        simulated_npu.forget_calls()
        simulated_npu.fail("aclmdlRIExecuteAsync", 507000, nth)
        with pytest.raises(offload.ExecutionError):
            run(x)
        simulated_npu.forget_calls()
        for _ in range(2):
            assert all(map(torch.equal, run(x), model(x)))


def test_nothing_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Exact(), numbers(4, 8)
    captured = offload.capture(model, x)
    n_launches = len(captured.program.launches)
    gc.collect()
    before_load = torch.npu.memory_allocated()
    run = placed(monkeypatch, captured, [index % 2 for index in range(n_launches)])
    for _ in range(3):
        run(x)
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    for _ in range(10):
        run(x)
        run.submit(x).result()
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == before
    run.close()
    del run
    gc.collect()
    assert torch.npu.memory_allocated() <= before_load

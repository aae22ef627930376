"""Launches of torch_npu models, timed before weights are planned; and reports of streaming."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ascend_simulator import AscendSimulator
from budgets import floor_of
from on_npu import check_same
from stored import save_weights, without_memory
from torch import nn

import offload
from offload.backends.ascend import TorchAscendBackend
from offload.backends.ascend.torch_backend import WarmUpTimer
from offload.console.amounts import show_bytes
from offload.load.place import place
from offload.native import _native
from offload.observe.report import report_on, report_table
from offload.timeline import SpanKind

WIDE = 384


class Uneven(nn.Module):
    """Small layers around one that takes a hundred times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.up, self.wide = nn.Linear(48, WIDE), nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.relu(layer(x))
        return self.down(self.wide(self.up(x)))


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    model = Uneven().eval()
    save_weights(model, tmp_path)
    return model


@pytest.fixture
def captured(model: nn.Module, tmp_path: Path) -> offload.Captured:
    given = torch.zeros(64, 48).npu()
    return offload.capture(without_memory(Uneven), given, weights=tmp_path)


def time_launches(captured: offload.Captured) -> offload.backends.TimedLaunches:
    backend = TorchAscendBackend()
    prepared = backend.prepare(captured.bound)
    return backend.timing.time_launches(prepared, place(prepared, backend))


def test_each_launch_has_a_time_of_its_own(captured: offload.Captured) -> None:
    timed = time_launches(captured)
    launches = captured.program.launches
    assert len(timed.times_ns) == len(launches)
    assert min(timed.times_ns) > 0
    assert timed.how.startswith("medians of 3 rounds, by events around each launch")


def test_plans_are_made_with_the_times_that_were_measured(
    model: nn.Module, captured: offload.Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    real = WarmUpTimer.time_launches

    def noted(self: WarmUpTimer, *arguments: object) -> offload.backends.TimedLaunches:
        found.append(real(self, *arguments))
        return found[-1]

    monkeypatch.setattr(WarmUpTimer, "time_launches", noted)
    with captured.load(weights_budget=floor_of(captured)) as run:
        (timed,) = found
        assert run.streaming.plan.compute_ns == pytest.approx(sum(timed.times_ns))
        text = run.streaming.explain()
        assert f"times of launches were measured, on made-up inputs: {timed.how}" in text
        x = torch.randn(64, 48)
        check_same(run(x.npu()), model(x))
    with captured.load(weights_budget=floor_of(captured), verify=False) as run:
        assert "estimates from their bytes: load(verify=False) exec" in run.streaming.explain()
    assert len(found) == 1


def test_generators_and_streams_are_left_as_they_were(captured: offload.Captured) -> None:
    torch.npu.manual_seed_all(7)
    generator = torch.npu.default_generators[0]
    generator.set_offset(24)
    before, stream = generator.get_state(), torch.npu.current_stream()
    time_launches(captured)
    assert torch.equal(generator.get_state(), before)
    assert torch.npu.current_stream() == stream


class Noisy(nn.Module):
    """Draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + torch.rand_like(x))
        return x


def test_numbers_that_are_drawn_meanwhile_are_drawn_again(tmp_path: Path) -> None:
    model = Noisy().eval()
    save_weights(model, tmp_path)
    x = torch.ones(4, 64).npu()
    captured = offload.capture(without_memory(Noisy), x, weights=tmp_path)
    torch.npu.manual_seed_all(5)
    generator = torch.npu.default_generators[0]
    before = generator.get_offset()
    timed = time_launches(captured)
    assert len(timed.times_ns) == len(captured.program.launches)
    assert generator.get_offset() == before
    with captured.load(weights_budget=floor_of(captured)) as run:
        found = run(x)
    after = generator.get_offset()
    torch.npu.manual_seed_all(5)
    check_same(found, model.npu()(x).cpu())
    assert generator.get_offset() == after > before


def test_a_runtime_without_events_that_tell_times_leaves_estimates(
    model: nn.Module,
    captured: offload.Captured,
    simulated_npu: AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = floor_of(captured)
    real = _native.AscendLaunchTimer

    def refused(device: int) -> _native.AscendLaunchTimer:
        simulated_npu.fail("aclrtCreateEventExWithFlag", 107000)
        return real(device)

    monkeypatch.setattr(_native, "AscendLaunchTimer", refused)
    with captured.load(weights_budget=budget) as run:
        says = "estimates from their bytes: launches could not be timed: the runtime makes no event"
        assert says in run.streaming.explain()
        x = torch.randn(64, 48)
        check_same(run(x.npu()), model(x))


class FailingTimer:
    """A timer with one failing runtime call, at the nth call of one method.

    By then torch's queue is empty, so that the call is not torch's.
    """

    def __init__(self, timer: object, simulator: AscendSimulator, failing: tuple[str, str, int]):
        self._timer, self._simulator = timer, simulator
        self._function, self._method, self._left = failing

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._timer, name)

        def call(*arguments: int) -> object:
            if name == self._method:
                self._left -= 1
                if not self._left:
                    self._simulator.fail(self._function, 507000)
            return method(*arguments)

        return call


@pytest.mark.parametrize(
    "failing",
    [
        ("aclrtMemcpyAsync", "before", 1),
        ("aclrtCreateEventExWithFlag", "before", 2),
        ("aclrtRecordEvent", "before", 1),
        ("aclrtRecordEvent", "after", 3),
        ("aclrtQueryEventStatus", "take", 1),
        ("aclrtSynchronizeEvent", "take", 2),
        ("aclrtEventElapsedTime", "take", 3),
    ],
    ids=lambda one: " ".join(map(str, one)),
)
def test_timing_that_fails_fails_the_load_and_leaves_nothing(
    failing: tuple[str, str, int],
    model: nn.Module,
    captured: offload.Captured,
    simulated_npu: AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = floor_of(captured)
    captured.load(weights_budget=budget).close()
    gc.collect()
    torch.npu.synchronize()
    kinds = ("event", "host memory", "model")
    held = [simulated_npu.live(kind) for kind in kinds]
    real = _native.AscendLaunchTimer
    with monkeypatch.context() as patch:
        patch.setattr(
            _native,
            "AscendLaunchTimer",
            lambda device: FailingTimer(real(device), simulated_npu, failing),
        )
        with pytest.raises(offload.ExecutionError, match="507000"):
            captured.load(weights_budget=budget)
    simulated_npu.forget_calls()
    gc.collect()
    torch.npu.synchronize()
    assert [simulated_npu.live(kind) for kind in kinds] == held
    with captured.load(weights_budget=budget) as run:
        x = torch.randn(64, 48)
        check_same(run(x.npu()), model(x))


# ---- reports of an execution ---------------------------------------------------------------------


def test_bytes_are_told_and_what_nobody_knows_is_not(
    model: nn.Module, captured: offload.Captured
) -> None:
    """A model's launches and copies have no times, and a call returns before they have ended."""
    with captured.load(weights_budget=floor_of(captured)) as run:
        plan = run.streaming.plan
        assert "measured: nothing has been executed yet" in run.streaming.explain()
        moved = run.streaming.bytes_moved
        lasts = []
        for _ in range(3):
            run(torch.randn(64, 48).npu())
            lasts.append(run.last_execution)
        torch.npu.synchronize()
        text = run.streaming.explain()
        report = report_on(run, lasts)
    streaming = report.streaming
    assert [one.bytes_streamed for one in lasts] == 3 * [plan.transfer_bytes]
    assert streaming.streamed_bytes == plan.transfer_bytes > 0
    assert streaming.predicted_ns == plan.period_ns > 0
    assert (streaming.bytes_per_second, streaming.wait_ns, streaming.measured_ns) == (None,) * 3
    assert f"{show_bytes(plan.transfer_bytes)} streamed for the last execution" in text
    assert text.count("/s") == 1  # of the link
    assert "waited" not in text.partition("times of launches")[0]
    assert all(
        (one.stream_busy_ns, one.stream_wait_ns, one.pass_ns) == (None,) * 3 for one in lasts
    )
    assert f"{show_bytes(plan.transfer_bytes)} of weights streamed" in str(lasts[-1])
    rows = dict(zip(*(one.cells for one in report_table(report).columns), strict=True))
    assert {"  streamed by an execution", "  execution, predicted"} <= rows.keys()
    assert not {"  streamed at", "  launches waited", "  execution, measured"} & rows.keys()
    # The very first execution copies what later ones find.
    assert run.streaming.bytes_moved - moved >= 3 * plan.transfer_bytes


def test_a_timeline_counts_bytes_and_has_no_waits_that_nobody_saw(
    captured: offload.Captured,
) -> None:
    with captured.load(weights_budget=floor_of(captured)) as run:
        with run.timeline() as timeline:
            for _ in range(2):
                run(torch.randn(64, 48).npu())
        torch.npu.synchronize()
        plan = run.streaming.plan
    assert [one.bytes_streamed for one in timeline.executions] == 2 * [plan.transfer_bytes]
    for one in timeline.executions:
        assert not one.of_kind(SpanKind.WAIT)
        assert not one.of_kind(SpanKind.WEIGHTS)
        assert not one.times_weights
        assert one.pass_ns is not None
        assert one.pass_ns > 0  # by the device's clock, around the model

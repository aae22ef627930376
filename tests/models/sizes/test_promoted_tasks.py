"""Sizes that repeat are promoted to tasks, as on devices: here on the CPU's tensors."""

from __future__ import annotations

import dataclasses

import capturing
import pytest
import torch
from capturing import CapturingBackend, check, eager, loaded
from promoting import (
    Layers,
    captured_layers,
    captured_model,
    executed_until_promoted,
    promoted_sizes,
)

import offload
from offload.host import scheduling_choice
from offload.host.promotion import TASKS


@pytest.fixture
def at_once(monkeypatch):
    capturing.at_once(monkeypatch)


# ---- results, reports, turns, memory -------------------------------------------------------------


def test_a_feature_map_of_the_callers_own(at_once):
    """A large enough one is used; with another one the host delivers the launches."""
    run = loaded()
    executed_until_promoted(run, 8, 40)
    own = dict(run._promoter.executables())
    for size in (8, 40, 8):
        x = torch.randn(size, 16)
        n_bytes = own[size,].feature_map_bytes
        for given_bytes in (n_bytes, n_bytes - 1):
            given = torch.empty(given_bytes, dtype=torch.uint8).fill_(0xFF)
            assert torch.equal(run(x, feature_map=given)[0], eager()(x)[0])
            assert run.last_execution.was_promoted == (given_bytes == n_bytes)
    with pytest.raises(offload.BindingError, match="expected a uint8 tensor"):
        run(x, feature_map=8)


def test_a_feature_map_that_is_not_shared_counts(at_once):
    run = loaded()
    executed_until_promoted(run, 40)
    shared_bytes = run.instances.promotion.size_bytes
    ((_, own),) = run._promoter.executables()
    alone = CapturingBackend()
    alone.capabilities = dataclasses.replace(alone.capabilities, shares_arena=False)
    run = loaded(backend=alone)
    executed_until_promoted(run, 40)
    outside_bytes = own.memory_report().outside_bytes
    expected_bytes = shared_bytes + own.feature_map_bytes + outside_bytes
    assert run.instances.promotion.size_bytes == expected_bytes


def test_tasks_that_keep_the_addresses_of_weights_go_and_come_again(at_once):
    model = Layers().eval()
    backend = CapturingBackend()
    backend.capabilities = dataclasses.replace(backend.capabilities, rebinds_weights=False)
    run = loaded(model=model, backend=backend)
    executed_until_promoted(run, 8, 9)
    model.first.weight.data = torch.randn(48, 16)
    run.rebind_weights()
    assert promoted_sizes(run) == []
    assert run.instances.promotion.n_demoted == 2
    x = torch.randn(8, 16)
    assert [check(run, x, model) for _ in range(3)] == [False, True, True]
    assert promoted_sizes(run) == [8]


def test_calls_under_autocast(at_once):
    model = Layers().eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        run = loaded(model=model)
        x = torch.randn(8, 16)
        assert [check(run, x, model) for _ in range(3)] == [False, True, True]
    with pytest.raises(offload.BindingError, match="autocast"):
        run(x)


# ---- options -------------------------------------------------------------------------------------


def test_options_that_contradict_one_another_are_refused():
    captured = captured_layers()
    sizes = offload.Sizes(promoted="1MiB")
    for scheduling in ("host", "offload"):
        with pytest.raises(offload.BindingError, match=f"scheduling='{scheduling}': with sizes"):
            captured.load(CapturingBackend(), sizes=sizes, scheduling=scheduling)
    with pytest.raises(offload.BindingError, match="scheduling: expected one of"):
        captured.load(CapturingBackend(), sizes=sizes, scheduling="often")
    with pytest.raises(offload.BackendUnavailable, match="no compiled kernels"):
        captured.load(CapturingBackend(), sizes=sizes, fuse=True)
    with pytest.raises(offload.BindingError, match=r"sizes\.promoted: expected a number of bytes"):
        captured.load(CapturingBackend(), sizes=offload.Sizes(promoted="much"))
    with pytest.raises(offload.BindingError, match="give fuse=True or fuse='auto'"):
        captured.load("cpu", sizes=sizes)


@pytest.fixture
def timed(monkeypatch):
    """Set measured durations of executions at the recorded sizes: as a task, by launches."""

    def make(one_task_ns, launches_ns):
        times = {"offload": one_task_ns, "host": launches_ns}
        monkeypatch.setattr(
            scheduling_choice,
            "taken_in_turns_ns",
            lambda what, *runs: [[times[one.scheduling.value]] * 3 for one in runs],
        )

    return make


def test_auto_takes_launches_unless_a_task_pays_soon(timed):
    captured = captured_model(Layers().eval())
    timed(one_task_ns=10, launches_ns=1_000)
    run = captured.load(CapturingBackend(), sizes=offload.Sizes(), scheduling="auto")
    assert isinstance(run, offload.SizedExecutable)
    assert "scheduled launch by launch: at n = 12 an execution took 0.0 us" in run.explain()
    assert "and not within 100; with sizes=Sizes(promoted=" in run.explain()
    timed(one_task_ns=10**9, launches_ns=10**12)
    run = captured.load(CapturingBackend(), sizes=offload.Sizes(), scheduling="auto")
    assert not isinstance(run, offload.SizedExecutable)
    assert "scheduled as one task for each choice of sizes: at n = 12" in run.explain()
    timed(one_task_ns=2_000, launches_ns=1_000)
    run = captured.load(CapturingBackend(), sizes=offload.Sizes(), scheduling="auto")
    assert "scheduled launch by launch: at n = 12 an execution took 2.0 us" in run.explain()
    assert check(run, torch.randn(8, 16)) is False


def test_auto_with_promoted_begins_with_what_was_measured(timed):
    captured = captured_layers()
    sizes = offload.Sizes(promoted="1MiB")
    timed(one_task_ns=1_000, launches_ns=4_000)
    run = captured.load(CapturingBackend(), sizes=sizes, scheduling="auto")
    assert "scheduled launch by launch, and sizes that repeat as tasks: at n = 12" in run.explain()
    report = run.instances.promotion
    assert 0 < report.expected_due_ns < TASKS.preparation_ns
    timed(one_task_ns=4_000, launches_ns=4_000)
    run = captured.load(CapturingBackend(), sizes=sizes, scheduling="auto")
    assert "no more sizes get tasks of their own" in run.explain()
    for _ in range(3):
        assert not check(run, torch.randn(8, 16))


def test_auto_measures_both():
    sizes = offload.Sizes(promoted="1MiB", buckets={"n": [16]}, pad={"x": 0.0})
    padded = captured_layers().load(CapturingBackend(), sizes=sizes, scheduling="auto")
    assert "as one task, and" in padded.explain()
    assert "loading the task took" in padded.explain()

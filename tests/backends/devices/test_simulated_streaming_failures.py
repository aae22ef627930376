"""Failures while streaming to a simulated device: messages and consequences."""

from __future__ import annotations

import gc

import pytest
import torch
from budgets import Deep
from device_streaming import (
    GIVEN,
    LOADS,
    check,
    expected_of,
    failing_load,
    on_devices,
    poison_after_last_use,
)

import offload
from offload.backends import host_memory
from offload.backends.captured.device_streaming import store_bytes


def test_a_file_that_cannot_be_read_again_fails_the_execution_alone(
    device, deep, least_budget, tmp_path
):
    given = torch.randn(*GIVEN)
    first, second = expected_of(deep, [given] * 2)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        check(run, [given], [first])
        path.write_bytes(content[: len(content) // 4])
        with pytest.raises(offload.FileError, match="not an intact safetensors file"):
            run.streaming.refresh()
        check(run, [given], [second])
        path.write_bytes(content)
        run.streaming.refresh()
        path.unlink()
        with pytest.raises(offload.ExecutionError, match=r"model\.safetensors"):
            run(given)
        path.write_bytes(content)
        check(run, [given], [first])


EXECUTIONS = {
    "cuda": [
        ("cuGraphLaunch", 1, False), ("cuEventRecord", 1, False), ("cuStreamWaitEvent", 1, False),
        ("cuStreamWaitEvent", 2, False), ("cuGraphLaunch", 1, True), ("cuMemcpyHtoDAsync", 1, True),
        ("cuMemcpyHtoDAsync", 2, True), ("cuStreamWaitEvent", 2, True), ("cuMemcpyHtoD", 1, True),
        ("cuMemHostRegister", 1, True), ("cuStreamSynchronize", 1, True),
    ],
    "npu": [
        ("aclmdlRIExecuteAsync", 1, False), ("aclrtRecordEvent", 1, False),
        ("aclrtStreamWaitEvent", 1, False), ("aclrtStreamWaitEvent", 2, False),
        ("aclrtResetEvent", 1, False), ("aclrtRecordEvent", 2, False),
        ("aclrtSynchronizeEvent", 1, False),
        ("aclmdlRIExecuteAsync", 1, True), ("aclrtMemcpyAsync", 2, True),
        ("aclrtMemcpyAsync", 1, True), ("aclrtStreamWaitEvent", 2, True),
        ("aclrtResetEvent", 1, True), ("aclrtMemcpy", 1, True), ("aclrtMallocHost", 1, True),
        ("aclrtSynchronizeStream", 1, True), ("aclrtSynchronizeStream", 2, True),
    ],
}  # fmt: skip
# Calls that fail after an execution, which is then enqueued.
BEHIND = {("cuStreamWaitEvent", 2), ("aclrtStreamWaitEvent", 2), ("aclrtResetEvent", 1),
          ("aclrtRecordEvent", 2), ("aclrtSynchronizeEvent", 1)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "function", "nth", "refreshes"), on_devices(EXECUTIONS), indirect=["device"]
)
def test_a_failed_call_leaves_the_next_execution_right(
    function, nth, refreshes, device, deep, least_budget
):
    """Without help: the next execution makes the prologue again, and reads stale weights again."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    with deep.load(device.backend.name, weights_budget=least_budget + 124 * 1024) as run:
        assert any(one.after_pass < 0 for one in run.streaming.plan.transfers)
        poison_after_last_use(device.backend, run)
        run(inputs[0])
        if refreshes:  # so that weights are read, and there is a prologue
            run.streaming.refresh()
        device.controls.fail(function, device.failure[0], nth)
        ticket = run.submit(inputs[0])
        with pytest.raises(offload.ExecutionError, match=device.failure[1]):
            ticket.wait()
        # The model counts its executions: the first unless its weights were read again, and the
        # second if it reached the wait for its outputs.
        n_counted = (not refreshes) + ((function, nth) in BEHIND)
        expected = expected_of(deep, inputs[:1] * n_counted + inputs)
        check(run, inputs, expected[n_counted:])


def test_a_copy_that_faults_surfaces_at_the_wait(device, deep, least_budget):
    given = torch.randn(*GIVEN)
    run = deep.load(device.backend.name, weights_budget=least_budget)
    run(given)
    device.controls.set_eager(False)
    device.controls.fault_copy(2)
    ticket = run.submit(given)
    with pytest.raises(offload.ExecutionError, match=device.fault):
        ticket.wait()
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "function", "nth"), on_devices(LOADS), indirect=["device"])
def test_a_failed_load_leaves_nothing(function, nth, device, deep, least_budget):
    deep.load(device.backend.name, weights_budget=least_budget, verify=False).close()
    gc.collect()  # graphs of refusals, whose errors hold frames
    held = device.held()
    with (
        failing_load(device, function, nth),
        pytest.raises(offload.ExecutionError, match=device.failure[1]),
    ):
        deep.load(device.backend.name, weights_budget=least_budget, verify=False)
    gc.collect()
    assert device.held() == held


def test_a_driver_that_registers_no_more_says_what_to_look_at(device, deep, least_budget):
    device.controls.fail(device.register, device.failure[0])
    with pytest.raises(
        offload.ExecutionError, match=r"(registering|allocating) \d+ bytes.*ulimit -l"
    ):
        deep.load(device.backend.name, weights_budget=least_budget, verify=False)


def test_a_store_that_the_host_has_no_room_for_is_refused_before_anything_is_read(
    device, deep, least_budget, monkeypatch
):
    def load(**options):
        return deep.load(device.backend.name, weights_budget=least_budget, verify=False, **options)

    with load() as run:
        plan = run.streaming.plan
        needed = store_bytes(plan)
        assert needed == sum(
            -(-one.size_bytes // 4096) * 4096 for one in plan.pieces if one.streamed
        )
    steps = []
    n_registered = device.controls.calls(device.register)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(
        offload.PlanError,
        match=f"needs {needed} bytes of host memory, and {needed - 1} are free.*weights_budget",
    ):
        load(progress=lambda *step: steps.append(step))
    assert steps == []
    assert device.controls.calls(device.register) == n_registered
    monkeypatch.setattr(host_memory, "free_bytes", lambda: needed)
    load().close()


def test_a_launch_that_failed_leaves_no_copies_beside_launches_of_the_host(
    device, deep, least_budget
):
    """The prologue of an execution that failed early ends before others are enqueued."""
    with deep.load(device.backend.name, weights_budget=least_budget + 60 * 1024) as run:
        resident = run._loaded.resident
        for fails in (True, False):
            run.streaming.refresh()  # so that there is a prologue
            if fails:
                device.controls.fail(device.execute, device.failure[0])
                with pytest.raises(offload.ExecutionError, match=device.failure[1]):
                    run(torch.randn(*GIVEN))
            else:
                run(torch.randn(*GIVEN))
            resident.set_stream(0)
            n_waits = device.controls.calls(device.wait_stream)
            resident.issue(1)
            assert device.controls.calls(device.wait_stream) == n_waits + 1
            resident.issue(2)
            assert device.controls.calls(device.wait_stream) == n_waits + 1


def test_what_progress_raises_ends_the_load_and_leaves_nothing(device, deep, least_budget):
    # A CUDA arena exists from now on.
    with deep.load(device.backend.name, weights_budget=least_budget):
        before = device.controls.live_bytes, device.controls.host_bytes

        def stop(done_bytes: int, _total: int, _what: str) -> None:
            if done_bytes:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            deep.load(device.backend.name, weights_budget=least_budget, progress=stop)
        assert (device.controls.live_bytes, device.controls.host_bytes) == before


def test_weights_of_a_closed_executable_are_refused(device, deep, least_budget):
    run = deep.load(device.backend.name, weights_budget=least_budget)
    weights = run.streaming
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        weights.refresh()
    with pytest.raises(offload.ExecutionError, match="closed"):
        weights.replace({"layers.0.0.weight": Deep().state_dict()["layers.0.0.weight"]})

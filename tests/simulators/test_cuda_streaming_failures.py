"""Streaming to the simulated device when something fails: what is said, and what follows."""

from __future__ import annotations

import gc

import pytest
import torch
from test_streaming import Deep

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import GIVEN, check, expected_of, poison_after_last_use, results

from offload.backends.cuda.graph import call, driver_bindings


def test_a_file_that_cannot_be_read_again_fails_the_execution_alone(
    backend, deep, device_floor, tmp_path
):
    given = torch.randn(*GIVEN)
    first, second = expected_of(deep, [given] * 2)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    with deep.load(backend.name, weights_budget=device_floor) as run:
        check(run, [given], [first])
        path.write_bytes(content[: len(content) // 4])
        with pytest.raises(offload.FileError, match="no intact safetensors file"):
            run.streaming.refresh()
        check(run, [given], [second])
        path.write_bytes(content)
        run.streaming.refresh()
        path.unlink()
        with pytest.raises(offload.ExecutionError, match=r"model\.safetensors"):
            run(given)
        path.write_bytes(content)
        check(run, [given], [first])


@pytest.mark.parametrize(
    ("function", "nth", "refreshes"),
    [("cuGraphLaunch", 1, False), ("cuEventRecord", 1, False), ("cuStreamWaitEvent", 1, False),
     ("cuStreamWaitEvent", 2, False), ("cuGraphLaunch", 1, True), ("cuMemcpyHtoDAsync", 1, True),
     ("cuMemcpyHtoDAsync", 2, True), ("cuStreamWaitEvent", 2, True), ("cuMemcpyHtoD", 1, True),
     ("cuMemHostRegister", 1, True), ("cuStreamSynchronize", 1, True)],
)  # fmt: skip
def test_a_failed_call_leaves_the_next_execution_right(
    function, nth, refreshes, backend, simulator, deep, device_floor
):
    """Without help: the execution behind it makes the prologue anew, and reads what was stale."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    with deep.load(backend.name, weights_budget=device_floor + 60 * 1024) as run:
        assert any(one.after_pass < 0 for one in run.streaming.plan.transfers)
        poison_after_last_use(backend, run)
        run(inputs[0])
        if refreshes:  # so that weights are read, and there is a prologue
            run.streaming.refresh()
        simulator.fail(function, 999, nth)
        ticket = run.submit(inputs[0])
        with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
            ticket.wait()
        # The model counts its executions: the first unless its weights were read again, and the
        # second if it came as far as the wait for its outputs.
        n_counted = (not refreshes) + (function == "cuStreamWaitEvent" and nth == 2)
        expected = expected_of(deep, inputs[:1] * n_counted + inputs)
        check(run, inputs, expected[n_counted:])


def test_after_a_wait_that_failed_the_prologue_comes_again(backend, simulator, deep, device_floor):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    with deep.load(backend.name, weights_budget=device_floor + 60 * 1024) as run:
        n_early = sum(one.after_pass < 0 for one in run.streaming.plan.transfers)
        assert n_early

        def n_copies(given, wanted) -> int:
            before = simulator.calls("cuMemcpyHtoDAsync")
            check(run, [given], [wanted])
            return simulator.calls("cuMemcpyHtoDAsync") - before

        check(run, inputs[:1], expected[:1])
        simulator.set_eager(False)
        ticket = run.submit(inputs[1])
        simulator.fail("cuEventSynchronize", 999)
        with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
            ticket.wait()
        simulator.set_eager(True)
        assert n_copies(inputs[2], expected[2]) == n_early


def test_a_copy_that_faults_surfaces_at_the_wait(backend, simulator, deep, device_floor):
    given = torch.randn(*GIVEN)
    run = deep.load(backend.name, weights_budget=device_floor)
    run(given)
    simulator.set_eager(False)
    simulator.fault_copy(2)
    ticket = run.submit(given)
    with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ticket.wait()
    run.close()


@pytest.mark.parametrize(
    ("function", "nth"),
    [("cuMemHostRegister", 1), ("cuMemHostRegister", 2), ("cuMemCreate", 1), ("cuMemMap", 1),
     ("cuMemcpyHtoD", 1), ("cuStreamCreate", 1), ("cuEventCreate", 2), ("cuGraphAddMemcpyNode", 2),
     ("cuGraphAddEventRecordNode", 1), ("cuGraphAddDependencies", 1)],
)  # fmt: skip
def test_a_failed_load_leaves_nothing(function, nth, backend, simulator, deep, device_floor):
    deep.load(backend.name, weights_budget=device_floor, verify=False).close()
    gc.collect()  # graphs of refusals, whose errors hold frames
    kinds = ("executable", "graph", "stream", "event", "mapping", "reservation")
    held = [simulator.live(kind) for kind in kinds], simulator.host_bytes, simulator.physical_bytes
    real = backend.prepare

    def prepare(program):
        found = real(program)
        simulator.fail(function, 999, nth)  # from here on: what captures call does not count
        return found

    backend.prepare = prepare
    with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
        deep.load(backend.name, weights_budget=device_floor, verify=False)
    simulator.forget_calls()
    gc.collect()
    found = [simulator.live(kind) for kind in kinds], simulator.host_bytes, simulator.physical_bytes
    assert found == held


def test_a_driver_that_registers_no_more_says_what_to_look_at(
    backend, simulator, deep, device_floor
):
    simulator.fail("cuMemHostRegister", 2)
    with pytest.raises(offload.ExecutionError, match=r"registering \d+ bytes.*ulimit -l"):
        deep.load(backend.name, weights_budget=device_floor, verify=False)


def test_what_progress_raises_ends_the_load_and_leaves_nothing(
    backend, simulator, deep, device_floor
):
    with deep.load(backend.name, weights_budget=device_floor):  # the arena is there from now on
        before = simulator.live_bytes, simulator.host_bytes

        def stop(done_bytes: int, _total_bytes: int) -> None:
            if done_bytes:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            deep.load(backend.name, weights_budget=device_floor, progress=stop)
        assert (simulator.live_bytes, simulator.host_bytes) == before


@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_closing_while_the_stream_is_captured_gives_no_weights_back(
    scheduling, backend, simulator, deep, device_floor, monkeypatch
):
    given = torch.randn(*GIVEN)
    (expected,) = expected_of(deep, [given])
    stream = call("cuStreamCreate", 1)
    monkeypatch.setattr(type(backend), "current_stream", lambda *_: int(stream))
    run = deep.load(backend.name, scheduling=scheduling, weights_budget=device_floor)
    simulator.set_eager(False)
    found = results(run(given))
    assert not torch.equal(found[0], expected[0])  # nothing has run
    call("cuStreamBeginCapture", stream, driver_bindings().CUstreamCaptureMode(2))
    held = simulator.physical_bytes, simulator.host_bytes
    run.close()
    assert (simulator.physical_bytes, simulator.host_bytes) == held
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(given)
    call("cuGraphDestroy", call("cuStreamEndCapture", stream))
    run.close()
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    assert simulator.host_bytes < held[1]
    assert simulator.physical_bytes < held[0]


def test_weights_of_a_closed_executable_are_refused(backend, deep, device_floor):
    run = deep.load(backend.name, weights_budget=device_floor)
    weights = run.streaming
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        weights.refresh()
    with pytest.raises(offload.ExecutionError, match="closed"):
        weights.replace({"layers.0.0.weight": Deep().state_dict()["layers.0.0.weight"]})

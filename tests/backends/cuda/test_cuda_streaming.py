"""Weights that a resident CUDA graph copies from the host: driver-specific behaviour.

Behaviour common to all simulated devices is in test_simulated_streaming.py.
"""

from __future__ import annotations

import gc

import pytest
import torch
from small_programs import IN, OUT, WEIGHT, launch, program
from stored import Wide, compute_wide, without_memory, write_wide

import offload
from offload.backends.captured.device_streaming import refuse_unstored
from offload.backends.cuda import streaming as cuda_streaming
from offload.backends.cuda.graph import call, driver_bindings
from offload.backends.cuda.streaming import link_meter
from offload.program import Bindings, BoundProgram, Opaque

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import GIVEN, check, expected_of, floor_on, results


def test_no_host_work_for_each_weight(backend, simulator, deep, device_floor):
    """After the first execution, one with the same addresses makes the same few calls."""
    given, out = torch.randn(*GIVEN), torch.empty(*GIVEN)
    functions = ("cuMemcpyHtoDAsync", "cuGraphExecMemcpyNodeSetParams", "cuMemcpyHtoD",
                 "cuGraphExecKernelNodeSetParams", "cuStreamSynchronize")  # fmt: skip
    with deep.load(backend.name, weights_budget=device_floor) as run:
        run(given, out=out)
        before = {name: simulator.calls(name) for name in functions}
        run(given, out=out)
        assert {name: simulator.calls(name) for name in functions} == before


def test_the_store_is_as_large_as_what_is_streamed(backend, simulator, deep, device_floor):
    gc.collect()  # held by the error that stated the floor
    n_pinned, n_physical = simulator.host_bytes, simulator.physical_bytes
    run = deep.load(backend.name, weights_budget=device_floor, verify=False)
    plan = run.streaming.plan
    streamed = [one.size_bytes for one in plan.pieces if one.streamed]
    rounding = 4096 * len(streamed)
    assert sum(streamed) <= simulator.host_bytes - n_pinned <= sum(streamed) + rounding
    run.close()
    assert simulator.host_bytes == n_pinned
    assert simulator.live("executable") == 0
    assert simulator.live("stream") == 0
    del run
    assert simulator.physical_bytes == n_physical


@pytest.mark.slow
def test_a_copy_of_more_than_256_mib_is_several_nodes(backend, simulator, tmp_path):
    width, n_layers = 8200, 2
    write_wide(tmp_path, width, n_layers)
    given = torch.full((1, width), 0.5)
    captured = offload.capture(
        without_memory(lambda: Wide(width, n_layers)), given, weights=tmp_path
    )
    expected = compute_wide(tmp_path, width, n_layers)
    budget = floor_on(captured, backend)
    n_nodes = simulator.calls("cuGraphAddMemcpyNode")
    with captured.load(backend.name, weights_budget=budget, verify=False) as run:
        n_transfers = len(run.streaming.plan.transfers)
        assert 4 * width**2 > 256 * 2**20
        assert n_transfers > 0
        assert simulator.calls("cuGraphAddMemcpyNode") - n_nodes == 2 * n_transfers
        for _ in range(2):
            torch.testing.assert_close(run(given), expected)


def test_the_proof_runs_without_the_weights(backend, deep, device_floor):
    with deep.load(backend.name, weights_budget=device_floor, verify=True) as run:
        assert run.streaming.plan.transfers


def test_free_memory_and_the_link_are_those_of_the_device(backend, simulator, deep):
    simulator.set_memory_limit(2**30)
    assert backend.weights.free_bytes(deep.program) == 2**30 - simulator.physical_bytes
    link_meter.forget()
    n_held = simulator.live_bytes, simulator.host_bytes, simulator.live("event")
    link = link_meter.link(0)
    assert link.bytes_per_second > 0
    assert link.overhead_ns >= 0
    assert (simulator.live_bytes, simulator.host_bytes, simulator.live("event")) == n_held
    n_calls = simulator.calls("cuMemcpyHtoDAsync")
    assert link_meter.link(0) == link
    assert simulator.calls("cuMemcpyHtoDAsync") == n_calls
    link_meter.forget()


def test_free_memory_is_that_of_the_programs_device(backend, deep, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_streaming, "free_bytes", lambda device: asked.append(device) or 0)
    monkeypatch.setattr(cuda_streaming, "device_of", lambda program: 1)
    assert backend.weights.free_bytes(deep.program) == 0
    assert asked == [1]


def test_an_opaque_launch_keeps_its_weights():
    launched = launch(0, [0, 1], 2, callee=Opaque(0, "it was compiled"))
    bound = BoundProgram(program([IN, WEIGHT, OUT], [launched], 2), Bindings(stored={1: None}))
    with pytest.raises(offload.BackendUnavailable, match=r"one opaque launch.*it was compiled"):
        refuse_unstored(bound)


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
        simulator.fail("cuEventSynchronize", 999)  # before a thread may wait
        ticket = run.submit(inputs[1])
        with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
            ticket.wait()
        simulator.set_eager(True)
        assert n_copies(inputs[2], expected[2]) == n_early


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

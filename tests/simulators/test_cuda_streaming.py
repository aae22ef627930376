"""Weights that a resident CUDA graph copies from the host: what is the driver's alone.

What holds on every simulated device is in test_device_streaming.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stored import Wide, compute_wide, without_memory, write_wide

import offload
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.streaming import link_meter
from offload.backends.device_streaming import refuse_unstored

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import GIVEN, floor_on


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
    n_pinned, n_physical = simulator.host_bytes, simulator.physical_bytes
    run = deep.load(backend.name, weights_budget=device_floor, verify=False)
    plan = run.streaming.plan
    rounding = 4096 * len(plan.transfers)
    assert plan.transfer_bytes <= simulator.host_bytes - n_pinned <= plan.transfer_bytes + rounding
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
    assert backend.free_bytes(deep.program) == 2**30 - simulator.physical_bytes
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
    monkeypatch.setattr(cuda_backend, "free_bytes", lambda device: asked.append(device) or 0)
    monkeypatch.setattr(cuda_backend, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_backend, "device_of", lambda program: 1)
    assert backend.free_bytes(deep.program) == 0
    assert asked == [1]


def test_an_opaque_launch_keeps_its_weights():
    program = SimpleNamespace(opaque=SimpleNamespace(reason="it was compiled"), stored={0: None})
    with pytest.raises(offload.BackendUnavailable, match=r"one opaque launch.*it was compiled"):
        refuse_unstored(program)

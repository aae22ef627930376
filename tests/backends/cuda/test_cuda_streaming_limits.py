"""Streaming to the simulated device: failing timing, and exhausted memory."""

from __future__ import annotations

import gc

import pytest
import torch

import offload
from offload.backends.cuda import CudaBackend
from offload.backends.cuda import backend as cuda_backend
from offload.load.place import place

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import GIVEN, floor_on


@pytest.mark.parametrize("function", ["cuGraphAddDependencies", "cuEventCreate", "cuGraphLaunch"])
def test_timing_that_fails_fails_the_load_and_leaves_nothing(
    function, backend, simulator, deep, device_floor
):
    prepared = backend.prepare(deep.bound)
    plan = place(prepared, backend)
    gc.collect()  # graphs of the other captures
    kinds = ("executable", "graph", "stream", "event", "mapping", "reservation")
    held = [simulator.live(kind) for kind in kinds], simulator.physical_bytes
    simulator.fail(function, 999)
    with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
        CudaBackend.timing.fget(backend).time_launches(prepared, plan)
    gc.collect()
    assert ([simulator.live(kind) for kind in kinds], simulator.physical_bytes) == held
    timed = CudaBackend.timing.fget(backend).time_launches(prepared, plan)
    assert len(timed.times_ns) == len(prepared.program.launches)
    assert min(timed.times_ns) > 0
    assert ([simulator.live(kind) for kind in kinds], simulator.physical_bytes) == held


@pytest.mark.parametrize(
    ("error", "n_loads"), [(offload.OutOfMemory, 4), (offload.ExecutionError, 1)]
)
def test_auto_tries_less_where_memory_ran_out_alone(
    error, n_loads, backend, deep, device_floor, monkeypatch
):
    budgets = []
    real = cuda_backend.make_stream

    def refuse(program, streaming, *others):
        budgets.append(streaming.budget_bytes)
        if len(budgets) < 4:
            raise error("refused")
        return real(program, streaming, *others)

    monkeypatch.setattr(cuda_backend, "make_stream", refuse)
    if error is offload.OutOfMemory:
        with deep.load(backend.name, weights_budget="auto") as run:
            assert run.streaming.plan.budget_bytes == budgets[-1]
    else:
        with pytest.raises(error, match="refused"):
            deep.load(backend.name, weights_budget="auto")
    assert len(budgets) == n_loads
    assert budgets == sorted(set(budgets), reverse=True)


@pytest.mark.slow
def test_device_memory_that_ran_out_is_told_from_other_failures(backend, simulator, deep):
    """Also from host memory, where a smaller budget would not help."""
    kinds = {}
    for function in ("cuMemCreate", "cuMemAddressReserve", "cuMemHostRegister", "cuMemMap"):
        for code in (2, 999):
            backend_floor = floor_on(deep, backend)
            real = type(backend).instantiate

            def instantiate(self, prepared, plan, real=real, function=function, code=code):
                simulator.fail_memory(function, code)
                return real(self, prepared, plan)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(backend), "instantiate", instantiate)
                with pytest.raises(offload.ExecutionError) as raised:
                    deep.load(backend.name, weights_budget=backend_floor, verify=False)
            kinds[function, code] = type(raised.value)
            simulator.forget_calls()
    expected = dict.fromkeys(kinds, offload.ExecutionError)
    for function in ("cuMemCreate", "cuMemAddressReserve", "cuMemMap"):
        expected[function, 2] = offload.OutOfMemory
    assert kinds == expected


@pytest.mark.parametrize(("code", "is_kept"), [(900, True), (700, False)])
def test_weight_memory_that_nobody_could_wait_for_stays(
    code, is_kept, backend, simulator, deep, device_floor
):
    """A refused wait says nothing about running work; after a fault nothing runs."""
    freed_bytes = []
    for result in (0, code):
        run = deep.load(backend.name, weights_budget=device_floor, verify=False)
        run(torch.randn(*GIVEN))
        before = simulator.physical_bytes
        if result:
            simulator.fail("cuCtxSynchronize", result)
        run.close()
        freed_bytes.append(before - simulator.physical_bytes)
    kept_bytes = freed_bytes[0] - freed_bytes[1]
    assert freed_bytes[0] > run.streaming.plan.memory_bytes
    assert (kept_bytes >= run.streaming.plan.memory_bytes) == is_kept

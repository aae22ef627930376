"""Tails of weights: calls that fail, and orders that are refused."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from simulator import NEWEST_FIRST

import offload
from offload.backends.captured.streamed_copies import check_copies, streamed_graph
from offload.backends.cuda import backend as cuda_backend
from offload.load.place import place
from offload.native import _native

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from device_streaming import (
    GIVEN,
    check,
    expected_of,
    floor_on,
    poison_after_last_use,
    results,
)
from streamed_tails import GRANULE, KIB, held, tails_of

pytestmark = pytest.mark.usefixtures("small_granules")

UNKNOWN, OUT_OF_MEMORY = 999, 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "refreshes"),
    [("cuGraphLaunch", False), ("cuStreamWaitEvent", False), ("cuGraphLaunch", True),
     ("cuMemcpyHtoDAsync", True), ("cuMemcpyHtoD", True)],
)  # fmt: skip
def test_a_failed_call_leaves_the_next_execution_right(
    function, refreshes, backend, simulator, headed
):
    """Also where a head, or the tail part of the prologue, was not read again."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(headed, inputs)
    with headed.load(backend.name, weights_budget=floor_on(headed, backend)) as run:
        assert tails_of(run.streaming.plan)
        poison_after_last_use(backend, run)
        check(run, inputs, expected)
        if refreshes:
            run.streaming.refresh()
        simulator.fail(function, UNKNOWN)
        ticket = run.submit(inputs[0])
        with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
            ticket.wait()
        check(run, inputs, expected)


MEMORY_CALLS = ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.mark.slow
@pytest.mark.parametrize("function", MEMORY_CALLS)
def test_a_failure_of_any_call_leaves_nothing(function, backend, simulator, deep, budget):
    with deep.load(backend.name, weights_budget=budget, verify=False) as run:  # keeps an arena
        prepared = backend.prepare(deep.bound)
        plan = dataclasses.replace(place(prepared, backend), streaming=run.streaming.plan)
        before = held(simulator)
        simulator.forget_calls()
        loaded = backend.instantiate(prepared, plan)
        n_calls = simulator.calls(function)
        assert n_calls > 1 + len(tails_of(plan.streaming))
        loaded.resident.close()
        del loaded
        assert held(simulator) == before
        for nth in range(1, n_calls + 1):
            for code in (UNKNOWN, OUT_OF_MEMORY):
                simulator.fail_memory(function, code, nth)
                with pytest.raises(offload.ExecutionError) as raised:
                    backend.instantiate(prepared, plan)
                simulator.forget_calls()
                assert (raised.type is offload.OutOfMemory) == (code == OUT_OF_MEMORY)
                del raised
                assert held(simulator, before) == before


@pytest.mark.slow
def test_what_is_closed_is_given_back_whole(backend, simulator, deep, budget):
    deep.load(backend.name, weights_budget=budget, verify=False).close()
    before = held(simulator)
    run = deep.load(backend.name, weights_budget=budget, verify=False)
    run(torch.randn(*GIVEN))
    assert simulator.live("mapping") > simulator.live("memory handle")  # some bytes twice
    run.close()
    del run
    assert held(simulator) == before


@pytest.mark.slow
def test_an_unmapping_that_fails_does_not_keep_the_rest(backend, simulator, deep, budget):
    """Closing cannot report it; all that can be released is released."""
    deep.load(backend.name, weights_budget=budget, verify=False).close()
    gc.collect()
    before = simulator.live("memory handle"), simulator.live("mapping")
    run = deep.load(backend.name, weights_budget=budget, verify=False)
    simulator.fail("cuMemUnmap", UNKNOWN)
    run.close()
    del run
    gc.collect()
    after = simulator.live("memory handle"), simulator.live("mapping")
    assert after == (before[0], before[1] + 1)


def test_pieces_off_the_granule_of_the_device_are_refused(backend):
    def make(granule: int, head: int) -> None:
        weight = torch.zeros(64 * KIB, dtype=torch.uint8)
        _native.CudaWeightStream(
            device=0,
            memory_bytes=64 * KIB,
            granule_bytes=granule,
            weights=[
                _native.StreamedWeight(
                    name="weight",
                    size_bytes=64 * KIB,
                    pieces=[(0, head, 0, False), (head, 64 * KIB - head, head, True)],
                    source=weight,
                )
            ],
            transfers=[(0, 1, 0, 0, 0, -1)],
            n_launches=1,
        ).close()

    make(GRANULE, GRANULE)
    with pytest.raises(offload.PlanError, match="maps memory by 16384 bytes, got 4096"):
        make(4 * KIB, 4 * KIB)
    with pytest.raises(offload.PlanError, match="granules of 16384"):
        make(GRANULE, 4 * KIB)


def test_a_launch_is_not_hidden_from_the_order_by_other_addresses(backend, simulator, deep, budget):
    """Without the edges between weights whose tails map the same memory results are wrong."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    refused = []

    def without_edges(program, graph, streaming):
        found = streamed_graph(program, graph, streaming)
        copies = tuple(dataclasses.replace(one, after=()) for one in found.copies)
        mutant = dataclasses.replace(found, copies=copies)
        try:
            check_copies(program, graph, streaming, mutant)
        except offload.CaptureError as error:
            refused.append(str(error))
        return mutant

    simulator.set_node_order(NEWEST_FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend, "streamed_graph", without_edges)
        with deep.load(backend.name, weights_budget=budget, verify=False) as run:
            outcomes = [results(run(given)) for given in inputs]
    assert "at the same place" in refused[0]
    assert any(
        not torch.equal(got, wanted)
        for one, other in zip(outcomes, expected, strict=True)
        for got, wanted in zip(one, other, strict=True)
    )

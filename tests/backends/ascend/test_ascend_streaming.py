"""Weights that an Ascend model copies from the host: events, streams, missing runtime features."""

from __future__ import annotations

import ctypes
import dataclasses
import gc

import pytest
import torch
from ascend_client import MEMORY_ALLOCATION, PARAM_INVALID
from device_streaming import (
    COPIES_FIRST,
    GIVEN,
    LAUNCHES_FIRST,
    AscendDevice,
    check,
    expected_of,
    floor_on,
    poison_after_last_use,
    results,
)

import offload
from offload.backends.ascend import AscendBackend
from offload.backends.ascend import backend as ascend_backend
from offload.backends.ascend import streaming as ascend_streaming
from offload.backends.ascend.streamed_steps import (
    Kind,
    Step,
    Stream,
    check_steps,
    launch_graph,
    streamed_steps,
)
from offload.backends.captured.streamed_copies import StreamedGraph, streamed_graph
from offload.native import _native
from offload.plan import NodeGraph, stream_weights, weight_demand
from offload.plan.streaming import Streaming

RELAXED = 2


@pytest.fixture
def npu(ascend, monkeypatch) -> AscendDevice:
    return AscendDevice(ascend, monkeypatch)


@pytest.fixture
def budget(deep, npu) -> int:
    """A budget with some transfers for the next pass and others for this one."""
    return floor_on(deep, npu.backend) + 60 * 1024


@dataclasses.dataclass
class Case:
    """The arguments of `check_steps`."""

    program: offload.Program
    graph: NodeGraph
    streaming: Streaming
    streamed: StreamedGraph
    steps: tuple[Step, ...]

    def check(self, steps: tuple[Step, ...]) -> None:
        check_steps(self.program, self.graph, self.streaming, self.streamed, steps)

    @property
    def events(self) -> range:
        """Without the last event, which joins the streams; the first one forks them."""
        return range(sum(one.kind is Kind.RECORD for one in self.steps) - 1)

    def without_event(self, event: int) -> tuple[Step, ...]:
        """The case without an event, with the others renumbered."""
        kinds = (Kind.RECORD, Kind.WAIT)
        return tuple(
            dataclasses.replace(one, index=one.index - 1)
            if one.kind in kinds and one.index > event
            else one
            for one in self.steps
            if not (one.kind in kinds and one.index == event)
        )


@pytest.fixture
def case(deep, npu, budget) -> Case:
    prepared = npu.backend.prepare(deep.bound)
    program, kernels = prepared.program, prepared.state.kernels
    streaming = stream_weights(
        weight_demand(program, [1000.0] * len(program.launches), prepared.bindings.stored.keys()),
        npu.backend.weights.memory_layout(program),
        npu.backend.weights.link(prepared.bound),
        budget,
    )
    graph = launch_graph(
        program,
        [[one.value for one in kernel.addresses] for kernel in kernels],
        [one.launch for one in kernels],
    )
    streamed = streamed_graph(program, graph, streaming)
    steps = streamed_steps(program, graph, streaming, streamed)
    return Case(program, graph, streaming, streamed, steps)


def test_steps_of_a_plan(case):
    kinds = {copy.for_next_pass for copy in case.streamed.copies}
    assert kinds == {False, True}
    nodes = [one.index for one in case.steps if one.kind is Kind.NODE]
    assert nodes == list(range(case.graph.n_nodes))
    transfers = [one.index for one in case.steps if one.kind is Kind.COPY]
    assert transfers == [copy.transfer for copy in case.streamed.copies]
    ready = next(at for at, one in enumerate(case.steps) if one.kind is Kind.READY)
    assert [one.kind for one in case.steps[ready:]].count(Kind.NODE) == 0
    assert case.steps[-1].kind is Kind.WAIT  # it joins the streams
    case.check(case.steps)


def test_each_event_is_needed(case):
    assert len(case.events) > 2
    for event in (*case.events, case.events.stop):
        with pytest.raises(offload.CaptureError):
            case.check(case.without_event(event))


def test_other_orders_of_steps_are_refused(case):
    steps = case.steps
    ready = next(one for one in steps if one.kind is Kind.READY)
    without_ready = tuple(one for one in steps if one is not ready)
    last_node = max(at for at, one in enumerate(steps) if one.kind is Kind.NODE)
    record = next(one for one in steps if one.kind is Kind.RECORD)
    changed = {
        "ready before every node has ended": (
            *without_ready[:last_node], ready, *without_ready[last_node:],
        ),
        "no event marks that": without_ready,
        "recorded twice": (record, *steps),
        "not recorded": tuple(one for one in steps if one != record),
        "would not be joined": steps[:-1],
        "waits for nothing before": (Step(Kind.COPY, Stream.COPIES, 0), *steps),
        "does not copy each": tuple(one for one in steps if one.kind is not Kind.COPY),
    }  # fmt: skip
    for says, one in changed.items():
        if says == "does not copy each":
            with pytest.raises(offload.CaptureError):
                case.check(one)
            continue
        with pytest.raises(offload.CaptureError, match=says):
            case.check(one)


@pytest.mark.slow
@pytest.mark.parametrize("order", [LAUNCHES_FIRST, COPIES_FIRST])
def test_results_tell_of_missing_events(order, case, deep, npu, budget, monkeypatch):
    """A stream runs as far as events allow, so results differ where an event is missing."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    records = {one.index: one.stream for one in case.steps if one.kind is Kind.RECORD}
    waits_for = Stream.COPIES if order == LAUNCHES_FIRST else Stream.LAUNCHES
    # Without the first one the second stream would not be captured.
    events = [event for event in case.events[1:] if records[event] is waits_for]
    assert events
    wrong = 0
    for event in events:
        mutated = case.without_event(event)
        monkeypatch.setattr(ascend_streaming, "streamed_steps", lambda *_, found=mutated: found)
        npu.set_order(order)
        with deep.load(npu.backend.name, weights_budget=budget, verify=False) as run:
            assert run.streaming.plan.transfers == case.streaming.transfers
            poison_after_last_use(npu.backend, run)
            outcomes = []
            for given in inputs:
                outcome = results(run(given))
                npu.settle(run)
                outcomes.append(outcome)
        wrong += any(
            not torch.equal(got, wanted)
            for one, other in zip(outcomes, expected, strict=True)
            for got, wanted in zip(one, other, strict=True)
        )
    assert wrong == len(events)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["capture", None])
def test_a_streamed_program_takes_three_streams(form, ascend, monkeypatch, deep):
    npu = AscendDevice(ascend, monkeypatch, form)
    ascend.set_software_sq(False)  # models use up streams
    budget = floor_on(deep, npu.backend)
    held = ascend.streams_in_use(), _native.ascend_streams()
    with deep.load(npu.backend.name, weights_budget=budget) as run:
        run(torch.randn(*GIVEN))
        assert ascend.streams_in_use() == held[0] + 3
        assert _native.ascend_streams() == held[1] + 3
        assert list(run.last_execution.substages_ns) == [
            "table copy",
            "prologue",
            "execute enqueue",
        ]
        run(torch.randn(*GIVEN))
        assert "prologue" not in run.last_execution.substages_ns
        run.streaming.refresh()
        run(torch.randn(*GIVEN))
        first, *_, prologue, last = run.last_execution.substages_ns
        assert (first, prologue, last) == ("weights read", "prologue", "execute enqueue")
        assert any(one.startswith("streams: 3, as the runtime reports") for one in run.notes())
    assert (ascend.streams_in_use(), _native.ascend_streams()) == held


def test_weights_are_streamed_by_captured_models_alone(ascend, monkeypatch, deep):
    npu = AscendDevice(ascend, monkeypatch, "build")
    budget = floor_on(deep, npu.backend)
    held = npu.held(), ascend.live("model")
    with pytest.raises(offload.BackendUnavailable, match=r"has to be captured.*207000"):
        deep.load(npu.backend.name, weights_budget=budget, verify=False)
    gc.collect()
    assert (npu.held(), ascend.live("model")) == held


def test_no_host_work_for_each_weight(ascend, npu, deep, budget):
    """After the first execution, one with the same addresses makes the same few calls."""
    given, out = torch.randn(*GIVEN), torch.empty(*GIVEN)
    functions = ("aclrtMemcpyAsync", "aclrtMemcpy", "aclrtSynchronizeStream", "aclrtMallocHost",
                 "aclrtCreateEventExWithFlag", "aclrtCreateEventWithFlag",
                 "aclrtLaunchKernel")  # fmt: skip
    with deep.load(npu.backend.name, weights_budget=budget) as run:
        run(given, out=out)
        run(given, out=out)
        before = {name: ascend.calls(name) for name in functions}
        executions, resets = ascend.calls("aclmdlRIExecuteAsync"), ascend.calls("aclrtResetEvent")
        run(given, out=out)
        after = {name: ascend.calls(name) for name in functions}
        assert after == before
        assert ascend.calls("aclmdlRIExecuteAsync") == executions + 1
        assert ascend.calls("aclrtResetEvent") == resets + 1


def test_the_store_is_as_large_as_what_is_streamed(ascend, npu, deep, budget, monkeypatch):
    before = ascend.live("host memory")
    n_bytes = []
    real = ascend_streaming.stream_weights

    def noted(*arguments, **options):
        ascend.start_trace()
        streamed = real(*arguments, **options)
        n_bytes.extend(
            int(one.rpartition("=")[2]) for one in ascend.trace if one.startswith("aclrtMallocHost")
        )
        return streamed

    monkeypatch.setattr(ascend_backend, "stream_weights", noted)
    with deep.load(npu.backend.name, weights_budget=budget) as run:
        plan = run.streaming.plan
        streamed = [one.size_bytes for one in plan.pieces if one.streamed]
        n_slabs = len(streamed)
        assert ascend.live("host memory") == before + n_slabs  # staging memory is freed
        assert len(n_bytes) == n_slabs
        assert sum(streamed) <= sum(n_bytes) <= sum(streamed) + 4096 * n_slabs
    assert ascend.live("host memory") == before


def test_without_external_events_the_end_of_the_model_is_waited_for(ascend, npu, deep, budget):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    real = npu.backend.prepare

    def prepare(bound):
        found = real(bound)
        ascend.fail("aclrtCreateEventWithFlag", PARAM_INVALID)
        return found

    npu.backend.prepare = prepare
    with deep.load(npu.backend.name, weights_budget=budget) as run:
        assert not run._loaded.weights.stream.outputs_are_early
        assert any("ACL_EVENT_EXTERNAL" in one for one in run.notes())
        resets = ascend.calls("aclrtResetEvent")
        poison_after_last_use(npu.backend, run)
        npu.set_order(COPIES_FIRST)
        check(run, inputs, expected, npu.settle)
        assert ascend.calls("aclrtResetEvent") == resets


@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_what_is_closed_while_its_stream_is_captured_keeps_its_weights(
    scheduling, ascend, npu, deep, budget, monkeypatch
):
    given, out = torch.randn(*GIVEN), torch.zeros(*GIVEN)
    ((wanted,),) = expected_of(deep, [given])
    stream = ascend.make("aclrtCreateStream")
    monkeypatch.setattr(type(npu.backend), "current_stream", lambda self, index: stream)
    run = deep.load(npu.backend.name, weights_budget=budget, scheduling=scheduling, verify=False)
    ascend.set_eager(False)
    run(given, out=out)
    ascend.call("aclmdlRICaptureBegin", stream, RELAXED)
    held = npu.held()
    run.close()
    assert npu.held() == held
    model = ctypes.c_uint64()
    ascend.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    ascend.call("aclmdlRIDestroy", model.value)
    run.close()
    assert torch.equal(out, wanted)
    assert ascend.live("host memory") == 0
    assert npu.held()[-1] <= held[-1] - run.streaming.plan.memory_bytes


def test_memory_of_the_device_that_ran_out_is_told_from_that_of_the_host(
    ascend, npu, deep, budget, monkeypatch
):
    """With a smaller budget more host memory is needed."""
    real = type(npu.backend).instantiate
    for function, kind in (
        ("aclrtMallocHost", offload.ExecutionError),
        ("aclrtMalloc", offload.OutOfMemory),
    ):

        def instantiate(self, prepared, plan, function=function):
            ascend.fail(function, MEMORY_ALLOCATION, 1 + (function == "aclrtMalloc"))
            return real(self, prepared, plan)

        monkeypatch.setattr(type(npu.backend), "instantiate", instantiate)
        with pytest.raises(offload.ExecutionError, match=str(MEMORY_ALLOCATION)) as raised:
            deep.load(npu.backend.name, weights_budget=budget, verify=False)
        assert type(raised.value) is kind
        ascend.forget_calls()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_memory_of_torch_that_ran_out_is_told_from_other_failures(kind, monkeypatch):
    def refuse(*_, **__):
        raise kind("NPU out of memory")

    monkeypatch.setattr(torch, "npu", object(), raising=False)
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(AscendBackend, "tensor_device", lambda *_: torch.device("cpu"))
    with pytest.raises(offload.ExecutionError, match=r"1024 bytes for weights.* memory") as raised:
        AscendBackend().weight_memory(0, 1024)
    ran_out = kind is torch.OutOfMemoryError
    assert type(raised.value) is (offload.OutOfMemory if ran_out else offload.ExecutionError)


def test_free_memory_and_the_link_are_those_of_the_device(ascend, npu, deep):
    ascend.set_memory_limit(2**30)
    free = npu.backend.weights.free_bytes(deep.program)
    address = ascend.make("aclrtMalloc", 2**20, 0)
    assert 2**30 >= free > npu.backend.weights.free_bytes(deep.program)
    ascend.call("aclrtFree", address)
    meter = ascend_streaming.link_meter
    meter.forget()
    held = npu.held()
    link = meter.link(0)
    assert link.bytes_per_second > 0
    assert link.overhead_ns >= 0
    assert npu.held() == held
    n_calls = ascend.calls("aclrtMemcpyAsync")
    assert meter.link(0) == link
    assert ascend.calls("aclrtMemcpyAsync") == n_calls
    meter.forget()

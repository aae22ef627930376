"""Arrival times of weights and waits of launches: by events of a device on a virtual clock."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
import torch
from device_streaming import (
    GIVEN,
    ORDERS,
    CudaDevice,
    check,
    expected_of,
    floor_on,
    poison_after_last_use,
)
from stored import save_weights, without_memory
from streamed_waits import (
    COPY_NS,
    KERNEL_NS,
    LONG_NS,
    by_hand,
    early_bytes,
    n_early,
    with_first,
)

import offload
from offload.observe.report import report_on, report_table
from offload.plan import simulate_streaming, weight_demand
from offload.timeline import SpanKind

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

ROOM = 124 * 1024  # one weight is read twice: with less it is copied twice


@pytest.fixture
def cuda_device(simulator, monkeypatch) -> CudaDevice:
    device = CudaDevice(simulator, monkeypatch)
    simulator.set_clock(KERNEL_NS, COPY_NS)
    return device


@pytest.fixture
def run(cuda_device, deep, device_floor):
    with deep.load(cuda_device.backend.name, weights_budget=device_floor + ROOM) as run:
        assert 0 < n_early(run.streaming.plan) < len(run.streaming.plan.transfers)
        yield run


def address_of(run: offload.Executable, transfer: int) -> int:
    """The address that a transfer writes."""
    piece = run.streaming.plan.pieces[run.streaming.plan.transfers[transfer].piece]
    return run._loaded.weights.tensors[piece.value].data_ptr() + piece.offset_bytes


def traced(run: offload.Executable, count: int = 1) -> list:
    """The records of this many executions in one timeline."""
    found = []
    with run.timeline():
        for _ in range(count):
            run(torch.randn(*GIVEN))
            found.append(run.last_execution)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("copy_ns", [0, COPY_NS, 3 * KERNEL_NS, LONG_NS])
def test_waits_are_those_that_copies_and_kernels_make(run, simulator, copy_ns):
    plan = run.streaming.plan
    simulator.set_clock(KERNEL_NS, copy_ns)
    expected = by_hand(plan, [copy_ns] * len(plan.transfers))
    waits = with_first(expected)
    assert bool(waits) == (copy_ns > KERNEL_NS)
    for last in traced(run, 3)[1:]:
        assert dict(last.stream_waits) == waits
        assert last.stream_wait_ns == sum(waits.values())
        assert last.pass_ns == expected.outputs_ready + waits.get(0, 0) - expected.waits.get(0, 0)
        assert last.pass_ns == len(plan.launch_ns) * KERNEL_NS + last.stream_wait_ns


def test_a_long_copy_is_the_wait_of_the_launch_that_reads_it(run, simulator):
    plan = run.streaming.plan
    run(torch.randn(*GIVEN))
    for long in range(n_early(plan), len(plan.transfers)):
        simulator.set_copy_ns(address_of(run, long), LONG_NS)
        copies_ns = [COPY_NS] * len(plan.transfers)
        same = address_of(run, long)
        for index in range(len(plan.transfers)):
            if address_of(run, index) == same:
                copies_ns[index] = LONG_NS
        last = traced(run, 2)[1]
        waits = dict(last.stream_waits)
        assert waits == with_first(by_hand(plan, copies_ns))
        assert waits[plan.transfers[long].first_launch] >= LONG_NS - len(plan.launch_ns) * KERNEL_NS
        simulator.set_copy_ns(address_of(run, long), COPY_NS)


def test_a_long_copy_for_the_next_pass_is_the_wait_of_its_first_launch(run, simulator):
    plan = run.streaming.plan
    simulator.set_copy_ns(address_of(run, 0), LONG_NS)
    first, second, third = traced(run, 3)
    assert second.stream_waits == third.stream_waits
    assert dict(second.stream_waits)[0] > LONG_NS - len(plan.launch_ns) * KERNEL_NS
    assert dict(first.stream_waits)[0] >= LONG_NS + COPY_NS * (n_early(plan) - 1)  # the prologue


def test_copies_that_run_meanwhile_are_told_by_the_next_execution(run, simulator):
    """Nothing waits for the last copies when an execution reports."""
    plan = run.streaming.plan
    run(torch.randn(*GIVEN))
    simulator.set_eager(False)
    with run.timeline() as timeline:
        for _ in range(3):
            run(torch.randn(*GIVEN))
    names = [
        run.program.values[plan.pieces[one.piece].value].name
        for one in (*plan.transfers[n_early(plan) :], *plan.transfers[: n_early(plan)])
    ]
    for one in timeline.executions[1:]:
        spans = [span for span in one.of_kind(SpanKind.WEIGHTS) if span.duration_ns]
        assert {span.name for span in spans} <= set(names)
        assert len(spans) >= len(plan.transfers) - n_early(plan)
    last = run.last_execution
    assert last.stream_timed_bytes == last.bytes_streamed
    assert last.stream_busy_ns == COPY_NS * len(plan.transfers)


@pytest.mark.parametrize("eager", [True, False])
def test_bytes_and_rates_are_those_of_copies_that_were_timed(run, simulator, eager):
    plan = run.streaming.plan
    run(torch.randn(*GIVEN))
    simulator.set_eager(eager)
    first, *others = traced(run, 3)
    simulator.set_eager(True)
    late = n_early(plan)
    assert first.bytes_streamed == plan.transfer_bytes
    assert first.stream_timed_bytes == plan.transfer_bytes - early_bytes(plan)
    assert first.stream_busy_ns == COPY_NS * (len(plan.transfers) - late)
    for last in others:
        assert last.stream_timed_bytes == last.bytes_streamed == plan.transfer_bytes
        assert last.stream_busy_ns == COPY_NS * len(plan.transfers)
        assert last.stream_bytes_per_second == pytest.approx(
            1e9 * plan.transfer_bytes / last.stream_busy_ns
        )


def test_a_prologue_is_timed(run):
    """The first execution, or one after new content, copies what others find."""
    plan = run.streaming.plan
    for _ in range(2):
        (last,) = traced(run)
        assert last.stream_timed_bytes == plan.transfer_bytes
        assert last.stream_busy_ns == COPY_NS * len(plan.transfers)
        assert dict(last.stream_waits)[0] == COPY_NS * n_early(plan)
        run.streaming.refresh()


def test_executions_that_nobody_asked_of_are_not_measured(run):
    traced(run)
    run(torch.randn(*GIVEN))
    last = run.last_execution
    assert last.bytes_streamed == run.streaming.plan.transfer_bytes
    unknown = (last.stream_timed_bytes, last.stream_busy_ns, last.stream_wait_ns, last.pass_ns)
    assert unknown == (None,) * 4
    assert last.stream_waits is None
    assert last.stream_bytes_per_second is None
    assert "waited" not in str(last)


def test_explain_and_the_report_show_what_was_measured_beside_what_was_predicted(run, simulator):
    plan = run.streaming.plan
    simulator.set_clock(KERNEL_NS, 3 * KERNEL_NS)
    executions = traced(run, 3)
    run(torch.randn(*GIVEN))
    executions.append(run.last_execution)
    text, report = run.streaming.explain(), report_on(run, executions)
    last, streaming = executions[2], report.streaming
    assert f"measured: {last.pass_ns / 1e6:.3f} ms by execution 3 of 4" in text
    assert f"of which launches waited {last.stream_wait_ns / 1e6:.3f} ms for weights" in text
    predicted = simulate_streaming(
        weight_demand(run.program, plan.launch_ns, run.bound.bindings.stored.keys()),
        plan,
        plan.link,
    ).wait_ns
    longest = max(last.stream_waits, key=lambda one: one[1])
    assert (
        f"waited in execution 3: launch {longest[0]} "
        f"{run.program.launches[longest[0]].name} {longest[1] / 1e6:.3f} ms, "
        f"{predicted[longest[0]] / 1e6:.3f} ms predicted" in text
    )
    assert streaming.n_measured == 3
    assert streaming.wait_ns == sorted(one.stream_wait_ns for one in executions[:3])[1]
    assert streaming.measured_ns == sorted(one.pass_ns for one in executions[:3])[1]
    assert streaming.predicted_wait_ns == pytest.approx(sum(predicted))
    assert {one.launch: one.measured_ns for one in streaming.waits if one.measured_ns} == dict(
        last.stream_waits
    )
    assert streaming.beyond_launches_ns is None
    rows = dict(zip(*(one.cells for one in report_table(report).columns), strict=True))
    assert {"  streamed at", "  launches waited", "  execution, measured"} <= rows.keys()


def test_a_timeline_has_transfers_and_waits_where_they_were(run, simulator):
    simulator.set_clock(KERNEL_NS, 3 * KERNEL_NS)
    with run.timeline() as timeline:
        for _ in range(2):
            run(torch.randn(*GIVEN))
    (_, one), last = timeline.executions, run.last_execution
    waits = one.of_kind(SpanKind.WAIT)
    assert sum(span.duration_ns for span in waits) == last.stream_wait_ns > 0
    launches = {span.launch: span for span in one.of_kind(SpanKind.LAUNCH)}
    assert all(launches[span.launch].begin_ns >= span.end_ns for span in waits)
    assert all(span.end_ns >= span.begin_ns for span in launches.values())
    streamed = sorted(one.of_kind(SpanKind.WEIGHTS), key=lambda span: span.begin_ns)
    assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(streamed))
    assert one.pass_ns == last.pass_ns


# ---- the two graphs of one executable ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_results_are_right_whichever_graph_runs(order, run, cuda_device, deep):
    """The last copies of either graph are those with which the next execution of either begins."""
    kinds = "ptpttpptt"
    inputs = [torch.randn(*GIVEN) for _ in kinds]
    expected = expected_of(deep, inputs)
    cuda_device.set_order(order)
    poison_after_last_use(cuda_device.backend, run)
    for kind, given, wanted in zip(kinds, inputs, expected, strict=True):
        if kind == "p":
            check(run, [given], [wanted])
        else:
            with run.timeline():
                check(run, [given], [wanted])


def test_what_moves_while_one_graph_rests_is_patched_in_both(run, cuda_device, deep):
    """Each execution has other addresses; a graph that did not run gets the latest."""
    n = 8
    inputs, outputs = ([torch.randn(*GIVEN) for _ in range(n)] for _ in range(2))
    expected = expected_of(deep, inputs)
    maps = [torch.empty(run.feature_map_bytes, dtype=torch.uint8) for _ in range(n)]
    with run.timeline():
        run(inputs[0], out=outputs[0], feature_map=maps[0])
    assert torch.equal(outputs[0], expected[0][0])
    for index in range(1, n):
        with run.timeline() if index in (3, 4, 7) else contextlib.nullcontext():
            run(inputs[index], out=outputs[index], feature_map=maps[index])
        assert torch.equal(outputs[index], expected[index][0])


def test_what_times_executions_is_given_back(run, cuda_device, simulator):
    run(torch.randn(*GIVEN))
    gc.collect()
    before = cuda_device.held()
    n_made = simulator.calls("cuGraphInstantiateWithFlags")
    with run.timeline():
        run(torch.randn(*GIVEN))
        assert cuda_device.held() != before
        run(torch.randn(*GIVEN))
    assert simulator.calls("cuGraphInstantiateWithFlags") == n_made + 1
    assert cuda_device.held() == before


def test_closing_inside_a_timeline_leaves_nothing(cuda_device, deep, device_floor):
    gc.collect()
    before = cuda_device.held()
    run = deep.load(cuda_device.backend.name, weights_budget=device_floor + ROOM, verify=False)
    with run.timeline():
        run(torch.randn(*GIVEN))
        run.close()
    del run
    gc.collect()
    assert cuda_device.held() == before


def test_the_timed_graph_has_all_that_the_other_has_and_events(run, simulator):
    plan = run.streaming.plan
    run(torch.randn(*GIVEN))
    n_events = simulator.calls("cuGraphAddEventRecordNode")
    traced(run)
    waiting = {one.first_launch for one in plan.transfers if one.after_pass == 0}
    added = simulator.calls("cuGraphAddEventRecordNode") - n_events
    assert added == 2 * len(plan.transfers) + len(waiting) + 1


CALLS = (
    "cuGraphClone", "cuGraphNodeFindInClone", "cuGraphAddEventRecordNode",
    "cuGraphAddDependencies", "cuGraphGetEdges", "cuGraphGetNodes", "cuGraphInstantiateWithFlags",
    "cuGraphUpload", "cuGraphLaunch", "cuGraphKernelNodeSetParams",
    "cuGraphExecKernelNodeSetParams", "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
    "cuEventElapsedTime", "cuStreamWaitEvent", "cuMemcpyHtoDAsync",
)  # fmt: skip


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))


@pytest.mark.slow
@pytest.mark.usefixtures("small_granules")
@pytest.mark.parametrize("function", CALLS)
def test_each_call_that_fails_leaves_nothing_and_the_next_execution_right(
    function, cuda_device, simulator, tmp_path
):
    """Two executions in a timeline, the first with a prologue, with each call failing once."""
    model = layers().eval()
    save_weights(model, tmp_path)
    given = torch.randn(2, 64)
    captured = offload.capture(without_memory(layers), given, weights=tmp_path)
    budget = floor_on(captured, cuda_device.backend) + 20 * 1024
    with torch.no_grad():
        wanted = model(given)

    with captured.load(cuda_device.backend.name, weights_budget=budget) as run:
        assert n_early(run.streaming.plan)

        # Each execution has another output than the preceding one: an address to patch.
        first, second, other = (torch.empty_like(wanted) for _ in range(3))

        def twice() -> None:
            run.streaming.refresh()
            with run.timeline():
                for output in (first, second):
                    assert torch.equal(run(given, out=output), wanted)

        twice()
        simulator.forget_calls()
        twice()
        n_calls = simulator.calls(function)
        assert n_calls
        gc.collect()  # memory of captures
        held = cuda_device.held()
        for nth in range(1, n_calls + 1):
            simulator.forget_calls()
            simulator.fail(function, cuda_device.failure[0], nth)
            with pytest.raises(offload.ExecutionError, match=cuda_device.failure[1]):
                twice()
            simulator.forget_calls()
            gc.collect()
            assert torch.equal(run(given, out=other), wanted)
            assert cuda_device.held() == held
            twice()

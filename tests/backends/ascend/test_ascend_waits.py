"""Measurements of executions that stream weights on an NPU: only the total."""

from __future__ import annotations

import pytest
import torch
from device_streaming import GIVEN, AscendDevice, check, expected_of, floor_on

from offload.observe.report import report_on, report_table
from offload.observe.timelines.summary import quantities_of
from offload.timeline import SpanKind

KERNEL_NS, LONG_NS = 1000, 500_000
EVENT_REFUSED = 107000  # PARAM_INVALID


@pytest.fixture
def npu_device(ascend, monkeypatch) -> AscendDevice:
    return AscendDevice(ascend, monkeypatch)


@pytest.fixture
def run(npu_device, deep):
    budget = floor_on(deep, npu_device.backend) + 60 * 1024
    with deep.load(npu_device.backend.name, weights_budget=budget) as run:
        npu_device.controls.set_clock(KERNEL_NS, 0)
        yield run


def traced(run) -> object:
    with run.timeline() as timeline:
        run(torch.randn(*GIVEN))
    return run.last_execution, timeline.executions[0]


def address_of(run, transfer) -> int:
    """The address that it writes."""
    piece = run.streaming.plan.pieces[transfer.piece]
    return run._loaded.weights.tensors[piece.value].data_ptr()


@pytest.mark.parametrize("eager", [True, False])
def test_an_execution_takes_its_launches_and_what_copies_expose(run, ascend, eager):
    plan, controls = run.streaming.plan, ascend
    controls.set_eager(eager)
    last, _ = traced(run)
    last, one = traced(run)
    launches_ns = last.pass_ns
    assert launches_ns % KERNEL_NS == 0
    assert 0 < launches_ns <= KERNEL_NS * len(plan.launch_ns)
    assert one.pass_ns == launches_ns
    # A copy waits for readers of the place before it, and its reader for it: they are serialised.
    addresses = [address_of(run, each) for each in plan.transfers]
    (middle, *_) = [at for at, each in enumerate(plan.transfers) if each.after_pass == 0]
    controls.set_copy_ns(addresses[middle], LONG_NS)
    long_ns = LONG_NS * addresses.count(addresses[middle])
    for _ in range(2):
        last, _ = traced(run)
    assert long_ns - launches_ns < last.pass_ns <= long_ns + launches_ns


def test_waits_and_copies_are_not_said_to_be_measured(run):
    plan = run.streaming.plan
    last, one = traced(run)
    unknown = (last.stream_timed_bytes, last.stream_busy_ns, last.stream_wait_ns)
    assert unknown == (None,) * 3
    assert last.stream_waits is None
    assert not one.times_weights
    assert not one.of_kind(SpanKind.WEIGHTS)
    assert not one.of_kind(SpanKind.WAIT)
    (row,) = [each for each in quantities_of([one]) if each.label.startswith("launches and waits")]
    assert row.measured_ns == last.pass_ns
    text, report = run.streaming.explain(), report_on(run, [last])
    streaming = report.streaming
    assert streaming.beyond_launches_ns == last.pass_ns - plan.compute_ns
    assert (streaming.bytes_per_second, streaming.wait_ns, streaming.waits) == (None, None, ())
    assert (streaming.measured_ns, streaming.n_measured) == (last.pass_ns, 1)
    assert f"measured: {last.pass_ns / 1e6:.3f} ms by the last execution" in text
    assert "events inside a captured model report no times" in text
    assert text.count("/s") == 1  # of the link
    rows = dict(zip(*(each.cells for each in report_table(report).columns), strict=True))
    assert {"  longer than launches alone", "  execution, measured"} <= rows.keys()
    assert not {"  streamed at", "  launches waited"} & rows.keys()


def test_where_times_of_launches_are_estimates_nothing_is_derived_from_them(npu_device, deep):
    budget = floor_on(deep, npu_device.backend)
    with deep.load(npu_device.backend.name, weights_budget=budget, verify=False) as run:
        last, _ = traced(run)
        assert last.pass_ns is not None
        assert "how much of it is waiting is not known" in run.streaming.explain()
        assert report_on(run, [last]).streaming.beyond_launches_ns is None


def test_other_executions_are_not_measured_and_keep_no_events(run, ascend):
    run(torch.randn(*GIVEN))
    n_events = ascend.live("event")
    last, _ = traced(run)
    assert ascend.live("event") == n_events
    assert last.pass_ns is not None
    run(torch.randn(*GIVEN))
    assert run.last_execution.pass_ns is None
    assert f"by execution {last.n_executions} of {last.n_executions + 1}" in run.streaming.explain()


def test_a_runtime_without_such_events_measures_nothing(run, ascend, deep):
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(deep, inputs)
    with run.timeline():
        for given, wanted in zip(inputs, expected, strict=True):
            ascend.fail("aclrtCreateEventExWithFlag", EVENT_REFUSED)
            check(run, [given], [wanted])
            assert run.last_execution.pass_ns is None
    assert "is measured only inside run.timeline(), if at" in run.streaming.explain()

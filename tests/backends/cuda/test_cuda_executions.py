"""From a Program to executions at new addresses, on the simulated driver."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import BindingError
from offload.program import Bindings, BoundProgram, Role, TensorView
from offload.timeline import Scheduling

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import (
    ACT,
    IN,
    OUT,
    WEIGHT,
    N,
    add,
    chain,
    on_device,
    result,
    scale,
)
from small_graphs import floats, make_program, words

from offload.backends.cuda.graph import call


def test_a_program_is_proved_and_executed_at_new_addresses(device):
    run = device.load(*chain(device))
    assert device.simulator.calls("cuGraphLaunch") == 4  # of the proof
    assert run._loaded.resident.n_graph_launches == 0
    for _ in range(3):
        x = on_device(torch.randn(N))
        y = on_device(torch.zeros(N))
        assert run(x, out=(y,))[0] is y
        run._loaded.resident.finish()
        assert torch.equal(y, (x * 2 + x) * 3)
        assert run.last_execution.bytes_copied == 0
    assert run.last_execution.slots_changed == 2
    assert run.last_execution.policy == "io"
    assert run._loaded.resident.n_graph_launches == 3


def test_a_call_asks_the_driver_for_a_launch_and_nothing_else(device):
    """Nothing moved or drawn: no event, no wait, no memory, no generator."""
    run = device.load(*chain(device))
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    run(x, out=(y,))
    device.simulator.forget_calls()
    run(x, out=(y,))
    run(x, out=(y,))
    assert device.simulator.all_calls() == {
        "cuCtxGetCurrent": 4,
        "cuStreamIsCapturing": 2,
        "cuGraphLaunch": 2,
    }
    run._loaded.resident.finish()
    assert torch.equal(y, (x * 2 + x) * 3)


def test_activations_and_scratch_share_the_feature_map(device):
    run = device.load(*chain(device))
    assert [value.role for value in run.program.values] == [IN, ACT, ACT, OUT, Role.SCRATCH]
    assert run.feature_map_bytes == 2 * 4 * N
    assert run.plan.unshared_bytes == 3 * 4 * N
    feature_map = on_device(torch.zeros(2 * N)).view(torch.uint8)
    x = on_device(torch.randn(N))
    (y,) = run(x, feature_map=feature_map)
    run._loaded.resident.finish()
    assert torch.equal(y, (x * 2 + x) * 3)
    assert run.last_execution.policy == "all"


def test_launch_reports_and_host_scheduling(device):
    run = device.load(*chain(device), scheduling=Scheduling.HOST, verify=False)
    assert [report.mode for report in run.launch_reports()] == ["graph"] * 3
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), (x * 2 + x) * 3)
    assert run._loaded.resident.n_graph_launches == 0


def test_without_verifying_nothing_is_executed(device):
    run = device.load(*chain(device), verify=False)
    assert device.simulator.calls("cuGraphLaunch") == 0
    assert device.simulator.calls("cuMemAlloc") == 0
    assert run.feature_map_bytes == 2 * 4 * N


def test_host_tables_are_relocated(device):
    """A kernel that finds its operands in a table, which a copy from the host has filled."""
    host = ctypes.create_string_buffer(16)

    def by_table(arguments: bytes) -> None:
        (table,) = struct.unpack("<Q", arguments)
        source, target = (ctypes.c_uint64 * 2).from_address(table)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * 7

    kernel = device.simulator.kernel("table_kernel", [8], by_table)

    def step(at):
        table = at.scratch(16)
        ctypes.memmove(host, words(at.at[0], at.at[1]), 16)
        call("cuMemcpyHtoDAsync", table, ctypes.addressof(host), 16, at.stream)
        at.launch(kernel, words(table))

    run = device.load(make_program([(IN, N), (OUT, N)], [("0", "1")]), [step])
    ctypes.memset(host, 0xFF, 16)
    for _ in range(3):
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), x * 7)


def test_copies_and_memsets_are_relocated(device):
    def step(at):
        call("cuMemcpyDtoDAsync", at.at[1], at.at[0], 4 * N, at.stream)
        call("cuMemsetD32Async", at.at[1] + 16, 0, 4, at.stream)

    run = device.load(make_program([(IN, N), (OUT, N)], [("0", "1")]), [step])
    for _ in range(3):
        x = on_device(torch.randn(N))
        expected = x.clone()
        expected[4:8] = 0
        assert torch.equal(result(run, x), expected)


def with_weight(program, weight):
    (value,) = program.of_role(WEIGHT)
    view = TensorView(value.index, 0, (N,), (1,), "float32")
    program = dataclasses.replace(program, weight_views={value.index: (view,)})
    return BoundProgram(program, Bindings(weights={value.index: (weight,)}))


def test_loading_leaves_weights_as_they_were(device):
    weight = on_device(torch.randn(N))
    before = weight.clone()
    program = with_weight(make_program([(IN, N), (WEIGHT, N), (OUT, N)], [("01", "12")]), weight)

    def step(at):
        add(at, device, at.at[0], at.at[1], at.at[1])
        scale(at, device, at.at[1], at.at[2], 2.0)

    run = device.load(program, [step])
    assert torch.equal(weight, before)
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), (before + x) * 2)
    assert torch.equal(weight, before + x)


def test_weights_that_are_replaced_must_be_aligned_too(device):
    weight = on_device(torch.ones(N))
    program = with_weight(make_program([(IN, N), (WEIGHT, N), (OUT, N)], [("01", "2")]), weight)
    run = device.load(program, [lambda at: add(at, device, at.at[0], at.at[1], at.at[2])])
    whole = on_device(torch.zeros(N + 1))
    odd = torch.frombuffer((ctypes.c_char * (4 * N)).from_address(whole.data_ptr() + 4),
                           dtype=torch.float32)  # fmt: skip
    bound, weight.data = weight.data, odd
    with pytest.raises(BindingError, match=r"weight1: its memory begins at .* clone\(\)"):
        run.rebind_weights()
    x = on_device(torch.randn(N))
    weight.data = bound
    assert torch.equal(result(run, x), x + 1)


def test_inputs_that_are_less_aligned_are_copied(device):
    # The copy lies in torch's memory, which on this device does not wait for late work.
    device.simulator.set_eager(True)
    run = device.load(*chain(device))
    whole = on_device(torch.randn(N + 1))
    x = whole[1:]
    assert torch.equal(result(run, x), (x * 2 + x) * 3)
    assert run.last_execution.bytes_copied == 4 * N


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """For each launch two existing Values, and whether another stream runs it."""
    return [
        (draw(st.integers(0, made)), draw(st.integers(0, made)), draw(st.booleans()))
        for made in range(draw(st.integers(1, 9)))
    ]


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(programs())
def test_random_programs_on_two_streams_compute_what_they_say(device, launches):
    """Value n + 1 is made by launch n of two earlier ones; the last is the output.

    The simulated device runs ready nodes last-added first, so that Values which share memory
    without an order between them get wrong results.
    """
    n_values = len(launches) + 1
    roles = [(IN, N), *[(ACT, N)] * (n_values - 2), (OUT, N)]
    touches = [(f"{one}{other}", str(made + 1)) for made, (one, other, _) in enumerate(launches)]

    def step_of(made: int):
        one, other, is_aside = launches[made]

        def step(at):
            if not hasattr(at, "side"):
                at.side = call("cuStreamCreate", 1)
                at.lanes, at.done = {}, {}
                begin(at)
            lane = at.side if is_aside else at.stream
            for source in {one, other} & set(at.done):
                if at.lanes[source] != is_aside:
                    call("cuStreamWaitEvent", lane, at.done[source], 0)
            block = at.scratch(4 * N)
            at.launch(device.add, words(at.at[one]), words(at.at[other]), words(block), stream=lane)
            at.launch(
                device.scale, words(block), words(at.at[made + 1]), struct.pack("<f", 0.5),
                stream=lane,
            )  # fmt: skip
            at.lanes[made + 1] = is_aside
            at.done[made + 1] = call("cuEventCreate", 2)
            call("cuEventRecord", at.done[made + 1], lane)
            if made == len(launches) - 1:
                event = call("cuEventCreate", 2)
                call("cuEventRecord", event, at.side)
                call("cuStreamWaitEvent", at.stream, event, 0)

        return step

    def begin(at):
        event = call("cuEventCreate", 2)
        call("cuEventRecord", event, at.stream)
        call("cuStreamWaitEvent", at.side, event, 0)

    with device.load(
        make_program(roles, touches), [step_of(made) for made in range(len(launches))]
    ) as run:
        for _ in range(2):
            x = on_device(torch.randn(N))
            values = [x]
            for one, other, _ in launches:
                values.append((values[one] + values[other]) * 0.5)
            assert torch.equal(result(run, x), values[-1])

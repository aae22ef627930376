"""From a Program to executions at new addresses, on the simulated driver."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import gc
import struct
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import BindingError, CaptureError, ExecutionError
from offload.program import Bindings, BoundProgram, Role, TensorView
from offload.timeline import Scheduling

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import (
    ACT,
    IN,
    OUT,
    WEIGHT,
    Device,
    N,
    add,
    chain,
    on_device,
    result,
    scale,
    scale_floats,
)
from small_graphs import StepCapturer, floats, make_program, words

from offload.backends.cuda import OwnedRange, backend
from offload.backends.cuda.graph import call
from offload.native import _native


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    return Device(simulator, monkeypatch)


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


class OwningCapturer(StepCapturer):
    """Its captures keep an additional object; `gone` is called at its end."""

    gone: Callable[[], None]

    def capture(self, bound, pool):
        class Owner:
            def __del__(_) -> None:
                self.gone()

        taken = super().capture(bound, pool)
        return dataclasses.replace(taken, keep=(taken.keep, Owner()))


@pytest.mark.parametrize("submitted", [False, True])
def test_what_the_graph_points_into_outlives_the_executable(device, submitted):
    constant = on_device(torch.full((N,), 5.0))
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    steps = [lambda at: add(at, device, at.at[0], constant.data_ptr(), at.at[1])]
    capturer = OwningCapturer(steps, [OwnedRange(constant.data_ptr(), 4 * N, "the test")])
    capturer.gone = lambda: None
    run = device.load(program, steps, capturer, verify=False)
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    seen = []
    capturer.gone = lambda: seen.append(torch.equal(y, x + 5))
    ticket = run.submit(x, out=(y,)) if submitted else run(x, out=(y,))
    del run, ticket
    while not seen:  # after a submission it is released on the lane's thread
        time.sleep(0.001)
    assert seen == [True]


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


def test_loading_twice_shares_the_arena(device):
    one = device.load(*chain(device), verify=False)
    physical = device.simulator.physical_bytes
    other = device.load(*chain(device), verify=False)
    assert other._loaded.resident.arena_address != one._loaded.resident.arena_address
    gc.collect()
    assert device.simulator.physical_bytes == physical
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    for run in (one, other):
        run(x, out=(y,))
    before = [run._loaded.resident.n_set_params for run in (one, other)]
    for run in (one, other, one, other):  # each at its own addresses: nothing is updated in between
        y.zero_()
        run(x, out=(y,))
        run._loaded.resident.finish()
        assert torch.equal(y, (x * 2 + x) * 3)
        assert run.last_execution.words_patched == 0
    assert [run._loaded.resident.n_set_params for run in (one, other)] == before


def test_threads_that_load_at_once_share_the_arena(device, monkeypatch):
    """Making an arena calls the driver, and another thread may come meanwhile."""
    made: list[_native.CudaArena] = []
    make = _native.CudaArena

    def slow(index: int) -> _native.CudaArena:
        time.sleep(0.05)
        made.append(make(index))
        return made[-1]

    monkeypatch.setattr(backend._native, "CudaArena", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        arenas = list(threads.map(lambda _: backend._arena(0), range(4)))
    assert len(made) == 1
    assert all(arena is made[0] for arena in arenas)


def test_closing_gives_back_the_memory_that_no_other_needs(device):
    one = device.load(*chain(device))
    kept = device.simulator.physical_bytes
    large = [(IN, N), *[(ACT, 1 << 20)] * 2, (OUT, N)]
    program = make_program(large, [("0", "1"), ("1", "2"), ("2", "3")])
    steps = [
        lambda at, index=index: scale(at, device, at.at[index], at.at[index + 1], 1.0)
        for index in range(3)
    ]
    other = device.load(program, steps, verify=False)
    assert device.simulator.physical_bytes - kept >= 6 << 20
    other.close()
    gc.collect()
    # A discovery keeps a separate chunk for as long as its graph.
    assert device.simulator.physical_bytes - kept <= 2 << 20
    x = on_device(torch.randn(N))
    assert torch.equal(result(one, x), (x * 2 + x) * 3)


def test_an_address_that_a_kernel_keeps_is_found_by_the_proof(device):
    """No argument shows it: the kernel writes to the first address it got."""
    kept: list[int] = []

    def keeping(arguments: bytes) -> None:
        source, result = struct.unpack("<2Q", arguments)
        kept.append(result)
        for index in range(N):
            floats(kept[0] if len(kept) > 2 else result, N)[index] = floats(source, N)[index] + 1

    kernel = device.simulator.kernel("keeping_kernel", [8, 8], keeping)
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])

    def step(at):
        at.launch(kernel, words(at.at[0]), words(at.at[1]))

    before = device.simulator.live_bytes
    with pytest.raises(CaptureError, match=r"a different result at other addresses: output1"):
        device.load(program, [step])
    assert device.simulator.live_bytes == before


def test_reads_that_the_program_does_not_know_are_found_by_the_proof(device):
    """A Value whose memory is reused too early, since its read is not declared."""
    program = make_program(
        [(IN, N), (ACT, N), (ACT, N), (ACT, N), (OUT, N)],
        [("0", "1"), ("0", "2"), ("2", "3"), ("3", "4")],
    )
    table: dict[int, int] = {}

    def remember(arguments: bytes) -> None:
        scale_floats(arguments)
        table[0] = struct.unpack("<2Qf", arguments)[1]

    def through_memory(arguments: bytes) -> None:
        source, target = struct.unpack("<2Q", arguments)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] + floats(table[0], N)[index]

    first = device.simulator.kernel("table_kernel", [8, 8, 4], remember)
    last = device.simulator.kernel("gather_kernel", [8, 8], through_memory)
    steps = [
        lambda at: at.launch(first, words(at.at[0]), words(at.at[1]), struct.pack("<f", 5.0)),
        lambda at: scale(at, device, at.at[0], at.at[2], 2.0),
        lambda at: scale(at, device, at.at[2], at.at[3], 2.0),
        lambda at: at.launch(last, words(at.at[3]), words(at.at[4])),
    ]
    with pytest.raises(CaptureError, match="a different result at other addresses"):
        device.load(program, steps)


@pytest.mark.parametrize("is_read", [False, True])
def test_padding_that_a_kernel_reads_is_found_by_the_proof(device, is_read):
    """Padding that differs in each capture: a counter, for example."""

    def padded(arguments: bytes) -> None:
        source, result, factor, padding = struct.unpack("<2QfI", arguments)
        for index in range(N):
            floats(result, N)[index] = floats(source, N)[index] * factor + padding * is_read

    kernel = device.simulator.kernel("padded_kernel", [8, 8, 8], padded)

    def step(at, source, result):
        padding = struct.pack("<fI", 2.0, 100 + at.number)
        at.launch(kernel, words(at.at[source]), words(at.at[result]), padding)

    program = make_program([(IN, N), (ACT, N), (OUT, N)], [("0", "1"), ("1", "2")])
    steps = [lambda at: step(at, 0, 1), lambda at: step(at, 1, 2)]
    before = device.simulator.live_bytes
    if is_read:  # the first of the two is named
        where = r"'padded_kernel' \(node 0\) of sim::step0 at model.py:1: parameter 2 differs"
        with pytest.raises(CaptureError, match=where):
            device.load(program, steps)
        assert device.simulator.live_bytes == before
        return
    run = device.load(program, steps)
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x * 4)


def test_padding_of_a_host_table_is_set_too(device):
    host = ctypes.create_string_buffer(24)

    def by_table(arguments: bytes) -> None:
        (table,) = struct.unpack("<Q", arguments)
        source, target, padding = (ctypes.c_uint64 * 3).from_address(table)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] + padding

    kernel = device.simulator.kernel("table_kernel", [8], by_table)

    def step(at):
        table = at.scratch(24)
        ctypes.memmove(host, words(at.at[0], at.at[1], at.number + 7), 24)
        call("cuMemcpyHtoDAsync", table, ctypes.addressof(host), 24, at.stream)
        at.launch(kernel, words(table))

    with pytest.raises(CaptureError, match=r"byte 16 of a host table differs .*depend on it"):
        device.load(make_program([(IN, N), (OUT, N)], [("0", "1")]), [step])


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


@pytest.mark.parametrize(
    ("function", "nth"),
    [("cuMemAlloc", 2), ("cuGraphInstantiateWithFlags", 2), ("cuGraphLaunch", 2)],
)
def test_a_driver_that_fails_leaves_nothing_behind(device, function, nth):
    program, steps = chain(device)
    before = device.simulator.physical_bytes
    device.simulator.fail(function, 2, nth)
    with pytest.raises(ExecutionError) as raised:
        device.load(program, steps)
    if function == "cuMemAlloc":
        assert "load(verify=False) leaves it out" in str(raised.value)
    del raised
    assert device.simulator.physical_bytes == before
    assert device.simulator.live_bytes == 0
    assert device.simulator.live("executable") == 0
    assert device.simulator.live("graph") == 0


def test_what_torch_only_keeps_is_given_back_for_pools_and_the_arena(device, monkeypatch):
    """Each requests it once where memory is short, and retries once."""
    simulator, emptied = device.simulator, []
    kept: list[int] = []

    def keep() -> None:
        """All but 1 MiB of the device's memory is torch's, until it is requested."""
        simulator.set_memory_limit(64 << 30)
        kept[:] = [int(call("cuMemAlloc", 64 << 20))]
        simulator.set_memory_limit(simulator.physical_bytes + (1 << 20))

    def empty() -> None:
        emptied.append(len(kept))
        while kept:
            call("cuMemFree", kept.pop())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    keep()
    program, steps = chain(device)
    with device.load(program, steps, verify=False) as run:
        assert emptied[:1] == [1]  # for the first pool
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), (x * 2 + x) * 3)
    resident, made = _native.CudaResident, []

    def make_resident(**given: object) -> object:
        if not made:
            keep()
        made.append(given)
        return resident(**given)

    emptied.clear()
    monkeypatch.setattr(_native, "CudaResident", make_resident)
    with device.load(program, steps, verify=False):
        assert emptied == [1]
        assert len(made) == 2


def test_a_device_fault_in_the_proof_is_an_execution_error(device):
    program, steps = chain(device)

    def failing(_: bytes) -> None:
        raise ValueError("as an illegal address would")

    kernel = device.simulator.kernel("failing_kernel", [8, 8], failing)
    steps[0] = lambda at: at.launch(kernel, words(at.at[0]), words(at.at[1]))
    with pytest.raises(ExecutionError):
        device.load(program, steps)

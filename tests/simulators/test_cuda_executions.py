"""From a Program to executions at new addresses, on the simulated driver."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import api
from offload.errors import BindingError, CaptureError, ExecutionError
from offload.explain import explain
from offload.machine import CopyCosts
from offload.program import Overlap, Role, TensorView
from offload.timeline import Scheduling

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from small_graphs import StepCapturer, current_context, floats, make_program, words

from offload.backends.cuda import CudaBackend, OwnedRange, backend
from offload.backends.cuda.graph import call

IN, ACT, OUT, WEIGHT = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.WEIGHT
N = 128  # elements of every Value


class SimulatedBackend(CudaBackend):
    """Takes tensors of the CPU: the simulated device's memory is the host's."""

    def tensor_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, index: int) -> int:
        return 0

    def copy_costs(self, index: int, resident: object) -> CopyCosts:
        """Not measured, so that every run decides alike: a copy never pays."""
        return CopyCosts(1.0, 1e9, 0.0, 0.0)


class CopyingBackend(SimulatedBackend):
    """Of a device on which a copy of these tensors costs as much as three nodes."""

    def copy_costs(self, index: int, resident: object) -> CopyCosts:
        return CopyCosts(1000.0, 1000.0, 1488.0, 1.0)


class Device:
    """The simulator, two kernels, and what was captured last."""

    def __init__(self, simulator, monkeypatch) -> None:
        self.simulator = simulator
        self.add = simulator.kernel("add_kernel", [8, 8, 8], _add)
        self.scale = simulator.kernel("scale_kernel", [8, 8, 4], _scale)
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(backend, "_arenas", weakref.WeakValueDictionary())

    def load(self, program, steps, capturer=None, backend=SimulatedBackend, **options):
        simulated = backend(capturer or StepCapturer(steps))
        self._monkeypatch.setattr(api, "find_backend", lambda name: simulated)
        return api.Captured(None, program=program).load("cuda", **options)


def _add(arguments: bytes) -> None:
    one, other, result = struct.unpack("<3Q", arguments)
    for index in range(N):
        floats(result, N)[index] = floats(one, N)[index] + floats(other, N)[index]


def _scale(arguments: bytes) -> None:
    source, result, factor = struct.unpack("<2Qf", arguments)
    for index in range(N):
        floats(result, N)[index] = floats(source, N)[index] * factor


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    current_context()
    return Device(simulator, monkeypatch)


def scale(at, device, source, result, factor):
    at.launch(device.scale, words(source), words(result), struct.pack("<f", factor))


def add(at, device, one, other, result):
    at.launch(device.add, words(one), words(other), words(result))


def chain(device):
    """out = ((x * 2) + x) * 3 by way of scratch memory: three launches, four nodes."""
    program = make_program(
        [(IN, N), (ACT, N), (ACT, N), (OUT, N)], [("0", "1"), ("01", "2"), ("2", "3")]
    )

    def last(at):
        block = at.scratch(4 * N)
        scale(at, device, at.at[2], block, 3.0)
        scale(at, device, block, at.at[3], 1.0)

    steps = [
        lambda at: scale(at, device, at.at[0], at.at[1], 2.0),
        lambda at: add(at, device, at.at[0], at.at[1], at.at[2]),
        last,
    ]
    return program, steps


def on_device(content: torch.Tensor) -> torch.Tensor:
    """The same numbers in the simulated device's memory, until it is reset."""
    n_bytes = content.numel() * 4
    address = int(call("cuMemAlloc", n_bytes))
    copy = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=torch.float32)
    return copy.copy_(content)


def result(run, x):
    (y,) = run(x, out=(on_device(torch.zeros(N)),))
    run._loaded.resident.finish()
    return y


def test_a_program_is_proved_and_executed_at_new_addresses(device):
    run = device.load(*chain(device))
    assert device.simulator.calls("cuGraphLaunch") == 3  # of the proof
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


def test_nothing_moved_sets_nothing(device):
    run = device.load(*chain(device))
    x, y = on_device(torch.randn(N)), on_device(torch.zeros(N))
    run(x, out=(y,))
    before = run._loaded.resident.n_set_params
    run(x, out=(y,))
    run._loaded.resident.finish()
    assert run._loaded.resident.n_set_params == before
    assert run.last_execution.words_patched == 0


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
    """Its captures keep something more; `gone` is called when that goes."""

    gone: Callable[[], None]

    def capture(self, program, pool):
        class Owner:
            def __del__(_) -> None:
                self.gone()

        taken = super().capture(program, pool)
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
    while not seen:  # after a submission it goes on the lane's thread
        time.sleep(0.001)
    assert seen == [True]


def test_launch_reports_and_host_scheduling(device):
    run = device.load(*chain(device), scheduling=Scheduling.HOST, verify=False)
    assert [report.mode for report in run.launch_reports()] == ["graph"] * 3
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), (x * 2 + x) * 3)
    assert run._loaded.resident.n_graph_launches == 0


def test_explain_says_that_launches_are_nodes_of_a_graph(device):
    run = device.load(*chain(device))
    assert "3 run as nodes of one graph on the device" in explain(run)


def test_without_verifying_nothing_is_executed(device):
    run = device.load(*chain(device), verify=False)
    assert device.simulator.calls("cuGraphLaunch") == 0
    assert device.simulator.calls("cuMemAlloc") == 0
    assert run.feature_map_bytes == 2 * 4 * N


def test_loading_twice_shares_the_arena(device):
    one = device.load(*chain(device))
    physical = device.simulator.physical_bytes
    other = device.load(*chain(device))
    assert other._loaded.resident.arena_address != one._loaded.resident.arena_address
    # A discovery keeps one chunk of its own for as long as its graph.
    assert device.simulator.physical_bytes - physical <= 2 << 20
    x = on_device(torch.randn(N))
    for run in (one, other, one):
        assert torch.equal(result(run, x), (x * 2 + x) * 3)


def test_an_address_that_a_kernel_keeps_is_found_by_the_proof(device):
    """Nothing in the arguments shows it: the kernel writes where it was first told to."""
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
    with pytest.raises(CaptureError, match=r"another result at other addresses: output1"):
        device.load(program, [step])
    assert device.simulator.live_bytes == before


def test_reads_that_the_program_does_not_know_are_found_by_the_proof(device):
    """A Value whose memory was given away too early, since nothing says that it is read."""
    program = make_program(
        [(IN, N), (ACT, N), (ACT, N), (ACT, N), (OUT, N)],
        [("0", "1"), ("0", "2"), ("2", "3"), ("3", "4")],
    )
    table: dict[int, int] = {}

    def remember(arguments: bytes) -> None:
        _scale(arguments)
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
    with pytest.raises(CaptureError, match="another result at other addresses"):
        device.load(program, steps)


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
    return dataclasses.replace(
        program, weights={value.index: (weight,)}, weight_views={value.index: (view,)}
    )


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


def test_weights_must_be_aligned(device):
    weight = on_device(torch.zeros(N + 1))
    odd = torch.frombuffer((ctypes.c_char * (4 * N)).from_address(weight.data_ptr() + 4),
                           dtype=torch.float32)  # fmt: skip
    program = with_weight(make_program([(IN, N), (WEIGHT, N), (OUT, N)], [("01", "2")]), odd)
    step = [lambda at: add(at, device, at.at[0], at.at[1], at.at[2])]
    with pytest.raises(BindingError, match=r"weight1: its memory begins at .* clone\(\)"):
        device.load(program, step)


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
    # The copy lies in memory of torch's, which on this device does not wait for late work.
    device.simulator.set_eager(True)
    run = device.load(*chain(device))
    whole = on_device(torch.randn(N + 1))
    x = whole[1:]
    assert torch.equal(result(run, x), (x * 2 + x) * 3)
    assert run.last_execution.bytes_copied == 4 * N


# ---- slots that are copied --------------------------------------------------------------------


def star(device, n_readers):
    """out = n * x + x, each term by a kernel that reads x; the last one alone writes out."""
    n = n_readers
    program = make_program(
        [(IN, N), *[(ACT, N)] * (n - 1), (OUT, N)],
        [("0", "1"), *[(f"0{at}", str(at + 1)) for at in range(1, n)]],
    )
    steps = [
        lambda at: scale(at, device, at.at[0], at.at[1], 2.0),
        *[
            lambda at, made=made: add(at, device, at.at[0], at.at[made], at.at[made + 1])
            for made in range(1, n)
        ],
    ]
    return program, steps


def test_a_slot_with_many_nodes_is_copied(device):
    run = device.load(*star(device, 5), backend=CopyingBackend)
    before = run._loaded.resident.n_set_params
    for _ in range(3):
        x = on_device(torch.randn(N))
        expected = functools.reduce(lambda total, _: x + total, range(4), x * 2)
        assert torch.equal(result(run, x), expected)
        assert run.last_execution.bytes_copied == 4 * N
    assert run.last_execution.slots_changed == 1  # the output
    assert run._loaded.resident.n_set_params - before == 2  # the first instantiated the graph
    assert run.memory_report().buffer_bytes == 4 * N
    said = explain(run)
    assert (
        "input input0: copied: 5 nodes would be re-set (5.0 us measured) against 3.0 us for a copy "
        "of 512 bytes; by itself it pays from K = 4 nodes on"
    ) in said
    assert "output output5: not copied: 1 nodes" in said
    assert "buffers of copied inputs and outputs: 512 bytes" in said


def test_a_slot_with_fewer_nodes_than_break_even_is_not_copied(device):
    run = device.load(*star(device, 3), backend=CopyingBackend)
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x + (x + x * 2))
    assert run.last_execution.bytes_copied == 0
    assert "input input0: not copied: 3 nodes" in explain(run)


def test_an_output_that_many_nodes_write_is_copied(device):
    def step(at):
        scale(at, device, at.at[0], at.at[1], 2.0)
        for _ in range(4):
            add(at, device, at.at[1], at.at[1], at.at[1])

    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    run = device.load(program, [step], backend=CopyingBackend)
    results = []
    for _ in range(3):
        x = on_device(torch.randn(N))
        (y,) = run.submit(x).result()
        results.append((y, x * 32))
        assert run.last_execution.bytes_copied == 4 * N
    assert all(torch.equal(y, expected) for y, expected in results)
    assert len({y.data_ptr() for y, _ in results}) == 3


def test_a_written_input_is_copied_both_ways_and_counted_so(device):
    def step(at):
        for _ in range(7):
            add(at, device, at.at[0], at.at[0], at.at[0])
        scale(at, device, at.at[0], at.at[1], 1.0)

    program = make_program([(IN, N), (OUT, N)], [("0", "01")])
    run = device.load(program, [step], backend=CopyingBackend)
    x = on_device(torch.randn(N))
    expected = x * 128
    assert torch.equal(result(run, x), expected)
    assert torch.equal(x, expected)
    assert run.last_execution.bytes_copied == 2 * 4 * N
    assert "copied: 8 nodes would be re-set (8.0 us measured) against 6.0 us" in explain(run)


def test_inputs_that_must_overlap_are_not_copied(device):
    """They are bound where they lie, however many nodes hold them."""

    def step(at):
        for _ in range(8):
            add(at, device, at.at[0], at.at[1], at.at[0])
        scale(at, device, at.at[0], at.at[2], 1.0)

    program = make_program([(IN, N), (IN, N), (OUT, N)], [("01", "02")])
    program = dataclasses.replace(program, overlaps=(Overlap(0, 1, 0),))
    run = device.load(program, [step], backend=CopyingBackend)
    x = on_device(torch.ones(N))
    run(x, x, out=(on_device(torch.zeros(N)),))
    run._loaded.resident.finish()
    assert x[0] == 256
    assert run.last_execution.bytes_copied == 0


def test_host_scheduling_copies_nothing(device):
    """A launch by itself is given its addresses anyway."""
    run = device.load(*star(device, 5), backend=CopyingBackend, scheduling=Scheduling.HOST)
    assert run.copy_choices == ()


def test_costs_are_measured_once_and_only_for_several_nodes(device, monkeypatch):
    class Measuring(SimulatedBackend):
        copy_costs = CudaBackend.copy_costs

    monkeypatch.setattr(backend, "_copy_costs", {})
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    steps = [lambda at: scale(at, device, at.at[0], at.at[1], 2.0)]
    device.load(program, steps, backend=Measuring)
    assert device.simulator.calls("cuEventElapsedTime") == 0
    for _ in range(2):
        run = device.load(*star(device, 5), backend=Measuring)
        n_calls = device.simulator.calls("cuEventElapsedTime")
        assert n_calls > 0
    assert device.simulator.calls("cuEventElapsedTime") == n_calls
    (costs,) = backend._copy_costs.values()
    assert run.copy_choices[0].set_ns == 5 * costs.set_node_ns
    x = on_device(torch.ones(N))
    assert result(run, x)[0] == 6


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """For each launch two Values that exist before it, and whether another stream runs it."""
    return [
        (draw(st.integers(0, made)), draw(st.integers(0, made)), draw(st.booleans()))
        for made in range(draw(st.integers(1, 9)))
    ]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(programs())
def test_random_programs_on_two_streams_compute_what_they_say(device, launches):
    """Value n + 1 is made by launch n of two earlier ones; the last is the output.

    The simulated device runs nodes that are ready last-added first, so that Values which share
    memory without an order between them come out wrong.
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


def test_a_device_fault_in_the_proof_is_an_execution_error(device):
    program, steps = chain(device)

    def failing(_: bytes) -> None:
        raise ValueError("as an illegal address would")

    kernel = device.simulator.kernel("failing_kernel", [8, 8], failing)
    steps[0] = lambda at: at.launch(kernel, words(at.at[0]), words(at.at[1]))
    with pytest.raises(ExecutionError):
        device.load(program, steps)

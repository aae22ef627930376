"""Addresses passed to kernels in a form that cannot be followed: copied, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import struct

import pytest
import torch
from budgets import budget_steps
from stored import save_weights, without_memory

import offload
from offload.errors import CaptureError
from offload.native import _native
from offload.program import Bindings, BoundProgram, Overlap, TensorView

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import simulated_backend
from aten_kernel import AtenKernel
from budgets import Deep
from device_streaming import GIVEN, expected_of
from loading import (
    ACT,
    IN,
    OUT,
    WEIGHT,
    Device,
    N,
    SimulatedBackend,
    add,
    on_device,
    result,
    scale,
)
from small_graphs import StepCapturer, floats, make_program, words

from offload.backends.captured.relocation.captures import NodeKind
from offload.backends.captured.relocation.fixed_values import FIXED_OWNER
from offload.timeline import Scheduling

KEY = 0x5A5A_0F0F_3C3C_A5A5
ONE_STEP = ([(IN, N), (OUT, N)], [("0", "1")])
VALUE_BYTES = 4 * N


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    return Device(simulator, monkeypatch)


def hidden_scale(device: Device, *, source: bool, target: bool):
    """A kernel that triples, and gets one or both addresses as a number that only it can decode."""

    def run(arguments: bytes) -> None:
        first, second = struct.unpack("<2Q", arguments)
        first ^= KEY if source else 0
        second ^= KEY if target else 0
        for index in range(N):
            floats(second, N)[index] = floats(first, N)[index] * 3

    kernel = device.simulator.kernel("hiding_kernel", [8, 8], run)

    def launch(at, first: int, second: int) -> None:
        hidden = (KEY if source else 0, KEY if target else 0)
        at.launch(kernel, words(first ^ hidden[0]), words(second ^ hidden[1]))

    return launch


def check(run, expected) -> None:
    """Check at addresses that are new each time, with no old memory left."""
    kept = []
    for _ in range(4):
        x = on_device(torch.randn(N))
        y = result(run, x)
        kept.append((y, expected(x)))
    assert all(torch.equal(y, expected) for y, expected in kept)
    assert len({y.data_ptr() for y, _ in kept}) == 4


def copies_of(run) -> list[tuple[int, bool]]:
    """(Value, whether it is copied in) of each copy that was added to the graph."""
    captured = run.captured_program
    nodes = captured.capture.nodes
    return [
        (word.value, word.offset_bytes == 0)
        for word in captured.discovery.words
        if nodes[word.node].kind is NodeKind.MEMCPY
    ]


class Loading:
    """Loads, and keeps the capturer and its captures.

    Attributes:
        capturer: the latest load's.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, program, steps, **options):
        prepared = []

        class Keeping(SimulatedBackend):
            def prepare(self, bound):
                prepared.append(super().prepare(bound))
                return prepared[-1]

        self.capturer = StepCapturer(steps)
        run = self.device.load(program, steps, self.capturer, Keeping, **options)
        run.captured_program = prepared.pop().state
        return run


@pytest.fixture
def load(device) -> Loading:
    return Loading(device)


# ---- what is copied ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "copies", "n_words"),
    [
        (True, False, [(0, True)], 2),
        (False, True, [(1, False)], 2),
        (True, True, [(0, True), (1, False)], 2),
    ],
    ids=["input", "output", "both"],
)
def test_what_a_hidden_address_may_be_of_is_copied(load, device, source, target, copies, n_words):
    """And nothing else: a plain address of the other stays a word of the kernel."""
    launch = hidden_scale(device, source=source, target=target)
    run = load(make_program(*ONE_STEP), [lambda at: launch(at, at.at[0], at.at[1])])
    assert load.capturer.n_captures == 8
    assert copies_of(run) == copies
    assert len(run.captured_program.discovery.words) == n_words
    assert run.captured_program.discovery.unexplained == ()
    check(run, lambda x: x * 3)
    assert run.last_execution.slots_changed == 2
    assert run.last_execution.bytes_copied == 0  # by the host; the graph copies
    said = run.explain()
    for name, is_hidden in (("input0", source), ("output1", target)):
        why = (
            rf"{name} is copied by the graph, .*fixed address \({VALUE_BYTES} bytes\): "
            r"kernel 'hiding_kernel' .*parameter \d .* differs between captures"
        )
        assert bool(re.search(why, said)) == is_hidden


def test_each_execution_patches_one_word_for_each_copy(load, device):
    """The kernel that hides both is never updated; its copies are."""
    launch = hidden_scale(device, source=True, target=True)
    run = load(make_program(*ONE_STEP), [lambda at: launch(at, at.at[0], at.at[1])])
    resident = run._loaded.resident
    result(run, on_device(torch.ones(N)))
    before = resident.n_set_params
    for count in range(1, 4):
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), x * 3)
        assert resident.n_set_params - before == 2 * count
    assert resident.n_instantiations == 1


def test_an_input_that_is_written_is_copied_back(load, device):
    """It is hidden; results computed from it have plain addresses."""
    launch = hidden_scale(device, source=True, target=True)

    def step(at):
        launch(at, at.at[0], at.at[0])  # in place

    def last(at):
        scale(at, device, at.at[0], at.at[1], 2.0)

    program = make_program([(IN, N), (OUT, N)], [("0", "0"), ("0", "1")])
    run = load(program, [step, last])
    assert copies_of(run) == [(0, True), (0, False)]
    for _ in range(3):
        x = on_device(torch.randn(N))
        before = x.clone()
        assert torch.equal(result(run, x), before * 3 * 2)
        assert torch.equal(x, before * 3)
    assert "written at each execution: input input0" in run.explain()


def test_an_activation_lies_outside_of_the_feature_map(load, device):
    """Between two kernels, of which the second hides its source."""
    launch = hidden_scale(device, source=True, target=False)
    program = make_program([(IN, N), (ACT, N), (ACT, N), (OUT, N)],
                           [("0", "1"), ("1", "2"), ("02", "3")])  # fmt: skip
    run = load(
        program,
        [
            lambda at: scale(at, device, at.at[0], at.at[1], 2.0),
            lambda at: launch(at, at.at[1], at.at[2]),
            lambda at: add(at, device, at.at[0], at.at[2], at.at[3]),
        ],
    )
    assert copies_of(run) == []
    assert run.plan.feature_map_bytes == VALUE_BYTES  # only the other activation
    for _ in range(3):
        x = on_device(torch.randn(N))
        given = on_device(torch.zeros(N)).view(torch.uint8)
        (y,) = run(x, out=(on_device(torch.zeros(N)),), feature_map=given)
        run._loaded.resident.finish()
        assert torch.equal(y, x + x * 2 * 3)
    assert f"1 lies outside the feature map, at a fixed address ({VALUE_BYTES} bytes)" in (
        run.explain()
    )


def test_a_difference_of_two_addresses_has_both_copied(load, device):
    """Both are also named, so at first the number cannot be attributed."""

    def run_kernel(arguments: bytes) -> None:
        source, target, distance = struct.unpack("<2Qq", arguments)
        assert target - source == distance
        for index in range(N):
            floats(source + distance, N)[index] = floats(source, N)[index] * 3

    kernel = device.simulator.kernel("hiding_kernel", [8, 8, 8], run_kernel)

    def step(at):
        distance = struct.pack("<q", at.at[1] - at.at[0])
        at.launch(kernel, words(at.at[0]), words(at.at[1]), distance)

    run = load(make_program(*ONE_STEP), [step])
    assert copies_of(run) == [(0, True), (1, False)]
    owners = {one.owner for one in run.captured_program.discovery.constants}
    assert owners == {FIXED_OWNER + "input0", FIXED_OWNER + "output1"}
    check(run, lambda x: x * 3)


def test_scratch_memory_that_is_hidden_stays(load, device):
    """It lies nowhere else then, and no Value of the launch need be copied for it."""
    launch = hidden_scale(device, source=False, target=True)
    again = hidden_scale(device, source=True, target=False)

    def step(at):
        block = at.scratch(4 * N)
        launch(at, at.at[0], block)
        again(at, block, at.at[1])

    run = load(make_program(*ONE_STEP), [step])
    assert any(one.value is None for one in run.captured_program.fixed.fixed)
    check(run, lambda x: x * 3 * 3)


def test_other_launches_use_the_same_copy(load, device):
    """Launches that name a fixed Value plainly find it at its fixed address."""
    launch = hidden_scale(device, source=True, target=False)
    program = make_program([(IN, N), (ACT, N), (OUT, N)], [("0", "1"), ("01", "2")])
    run = load(
        program,
        [
            lambda at: launch(at, at.at[0], at.at[1]),
            lambda at: add(at, device, at.at[0], at.at[1], at.at[2]),
        ],
    )
    assert copies_of(run) == [(0, True)]
    check(run, lambda x: x + x * 3)


def weighing(device, *, hides_weight: bool):
    """A program of one kernel, target = source * weight, that hides the address of one of them."""

    def run_kernel(arguments: bytes) -> None:
        source, weight, target = struct.unpack("<3Q", arguments)
        source, weight = (source, weight ^ KEY) if hides_weight else (source ^ KEY, weight)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * floats(weight, N)[index]

    kernel = device.simulator.kernel("hiding_kernel", [8, 8, 8], run_kernel)

    def step(at):
        keys = (0, KEY) if hides_weight else (KEY, 0)
        at.launch(kernel, words(at.at[0] ^ keys[0]), words(at.at[1] ^ keys[1]), words(at.at[2]))

    program = make_program([(IN, N), (WEIGHT, N), (OUT, N)], [("01", "2")])
    weight = on_device(torch.randn(N))
    view = TensorView(1, 0, (N,), (1,), "float32")
    program = dataclasses.replace(program, weight_views={1: (view,)})
    return BoundProgram(program, Bindings(weights={1: (weight,)})), step, weight


def test_a_weight_that_is_named_stays_where_it_is(load, device):
    """Though its launch hides another address."""
    bound, step, weight = weighing(device, hides_weight=False)
    run = load(bound, [step])
    assert copies_of(run) == [(0, True)]
    for _ in range(3):
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), x * weight)


def test_a_weight_that_is_hidden_is_refused(load, device):
    """Whatever else of its launch stays at one address, its own memory is the caller's."""
    bound, step, _ = weighing(device, hides_weight=True)
    with pytest.raises(CaptureError, match=r"parameter 1 .*[(]also where the inputs and results"):
        load(bound, [step])
    assert load.capturer.n_captures == 8


def test_a_host_that_schedules_launches_copies_too(load, device):
    launch = hidden_scale(device, source=True, target=True)
    program = make_program([(IN, N), (ACT, N), (OUT, N)], [("0", "1"), ("1", "2")])
    other = hidden_scale(device, source=False, target=True)
    steps = [
        lambda at: launch(at, at.at[0], at.at[1]),
        lambda at: other(at, at.at[1], at.at[2]),
    ]
    run = load(program, steps, scheduling=Scheduling.HOST)
    assert copies_of(run) == [(0, True), (2, False)]
    check(run, lambda x: x * 3 * 3)


# ---- unchanged, or refused -----------------------------------------------------------------------


def test_a_program_whose_words_are_explained_is_as_before(load, device):
    program = make_program(*ONE_STEP)
    run = load(program, [lambda at: scale(at, device, at.at[0], at.at[1], 3.0)])
    assert load.capturer.n_captures == 4
    captured = run.captured_program
    assert captured.fixed.fixed == ()
    assert [(one.node, one.offset_bytes, one.value) for one in captured.discovery.words] == [
        (0, 0, 0),
        (0, 8, 1),
    ]
    assert len(captured.capture.nodes) == 1
    assert "copied by the graph" not in run.explain()
    check(run, lambda x: x * 3)


def test_inputs_that_share_memory_are_refused(load, device):
    """A copy of each would not share it."""
    launch = hidden_scale(device, source=True, target=True)
    program = make_program([(IN, N), (IN, N), (OUT, N)], [("01", "0"), ("01", "2")])
    program = dataclasses.replace(program, overlaps=(Overlap(0, 1, 0),))
    steps = [
        lambda at: launch(at, at.at[0], at.at[0]),
        lambda at: add(at, device, at.at[0], at.at[1], at.at[2]),
    ]
    with pytest.raises(CaptureError, match=r"cannot stay at one address: .* share memory"):
        load(program, steps)


def test_what_no_value_explains_is_refused(load, device):
    """A number that differs in each layout, and relates to nothing that the launch uses."""
    kernel = device.simulator.kernel("hiding_kernel", [8, 8, 8], lambda _: None)

    def step(at):
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(0xAB_0000_0000 + at.layout))

    with pytest.raises(CaptureError, match=r"parameter 2 .*[(]also where the inputs and results"):
        load(make_program(*ONE_STEP), [step])
    assert load.capturer.n_captures == 8


def test_the_proof_finds_what_hides_where_nothing_differs(load, device):
    """A kernel that keeps a feature map address internally, in no word."""
    launch = hidden_scale(device, source=True, target=False)
    hidden: dict[int, int] = {}

    def read_elsewhere(arguments: bytes) -> None:
        _, target = struct.unpack("<2Q", arguments)
        for index in range(N):
            floats(target, N)[index] = floats(hidden[0], N)[index] * 2

    kernel = device.simulator.kernel("texture_kernel", [8, 8], read_elsewhere)

    def last(at):
        hidden[0] = at.at[1]
        at.launch(kernel, words(at.at[0]), words(at.at[2]))

    program = make_program([(IN, N), (ACT, N), (OUT, N)], [("0", "1"), ("01", "2")])
    with pytest.raises(CaptureError, match="gives a different result"):
        load(program, [lambda at: launch(at, at.at[0], at.at[1]), last])


# ---- the pool, memory, and whole models ----------------------------------------------------------


def test_a_pool_gives_fixed_addresses_in_each_layout(device):
    """By the number of the allocation; the other addresses are as without fixed ones."""
    sizes = (4096, 1 << 21, 100)
    plain = _native.DiscoveryPool(0, 7)
    expected = [plain.allocate(size) for size in sizes]
    plain.fix(1, 0x1234_0000)
    for _ in range(2):
        plain.rewind()
        found = [plain.allocate(size) for size in sizes]
        assert found == [expected[0], 0x1234_0000, expected[2]]
        assert plain.events()[1] == ("allocate", 0x1234_0000, 1 << 21)
    other = _native.DiscoveryPool(0, 8)
    other.fix(1, 0x1234_0000)
    moved = [other.allocate(size) for size in sizes]
    assert moved[1] == 0x1234_0000
    assert moved[0] != expected[0]


def test_closing_gives_the_memory_back(load, device):
    launch = hidden_scale(device, source=True, target=True)
    x, out = on_device(torch.ones(N)), on_device(torch.zeros(N))
    gc.collect()
    before = device.simulator.physical_bytes, device.simulator.live("graph")
    run = load(make_program(*ONE_STEP), [lambda at: launch(at, at.at[0], at.at[1])])
    run.captured_program = None
    run(x, out=(out,))
    run._loaded.resident.finish()
    assert torch.equal(out, x * 3)
    assert device.simulator.physical_bytes > before[0]
    run.close()
    del run
    gc.collect()
    assert (device.simulator.physical_bytes, device.simulator.live("graph")) == before


def test_what_is_refused_leaves_nothing(load, device):
    """Nothing of any capture made for it."""
    kernel = device.simulator.kernel("hiding_kernel", [8, 8, 8], lambda _: None)

    def step(at):
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(0xAB_0000_0000 + at.layout))

    before = device.simulator.physical_bytes, device.simulator.live("graph")
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            load(make_program(*ONE_STEP), [step])
        assert (device.simulator.physical_bytes, device.simulator.live("graph")) == before
    finally:
        gc.enable()


def hide(monkeypatch, roles) -> None:
    """Pass such Values to kernels of torch's operators by hidden addresses."""
    arguments, execute = AtenKernel.arguments, AtenKernel.execute

    def hidden(self, block: bytes) -> bytes:
        content = bytearray(block)
        for index, view in enumerate(self.views, start=1):
            if self.program.values[view.value].role in roles:
                (word,) = struct.unpack_from("<Q", content, 8 * index)
                struct.pack_into("<Q", content, 8 * index, word ^ KEY)
        return bytes(content)

    monkeypatch.setattr(AtenKernel, "arguments", lambda one, at: hidden(one, arguments(one, at)))
    monkeypatch.setattr(AtenKernel, "execute", lambda one, block: execute(one, hidden(one, block)))


@pytest.mark.slow
@pytest.mark.parametrize("roles", [{IN}, {OUT}, {IN, OUT}, {IN, ACT, OUT}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_models_whose_kernels_hide_give_the_same_bits(
    simulator, monkeypatch, tmp_path, roles, is_streamed
):
    """Also where weights, whose addresses are plain, are streamed."""
    simulator.set_granularity(16 * 1024)  # the model has no 2 MiB
    backend = simulated_backend.install(simulator, monkeypatch)
    hide(monkeypatch, roles)
    save_weights(Deep().eval(), tmp_path)
    make = functools.partial(torch.randn, *GIVEN)
    captured = offload.capture(without_memory(Deep), make(), weights=tmp_path)
    inputs = [make() for _ in range(4)]
    expected = expected_of(captured, inputs)
    budget = budget_steps(captured, backend)[0 if is_streamed else -1]
    with captured.load(backend.name, weights_budget=budget) as run:
        assert bool(run.streaming.plan.transfers) == is_streamed
        assert run.explain().count("is copied by the graph") == len(roles & {IN, OUT})
        assert (run.plan.feature_map_bytes == 0) == (ACT in roles)
        for given, (wanted,) in zip(inputs, expected, strict=True):
            # A copy in the graph takes no memory of the host.
            out = on_device(torch.zeros(wanted.numel())).view(wanted.shape)
            run(on_device(given.flatten()).view(given.shape), out=out)
            run._loaded.resident.finish()
            assert torch.equal(out, wanted)

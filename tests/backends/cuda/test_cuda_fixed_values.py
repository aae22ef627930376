"""Values whose addresses cannot be followed: the graph copies them, and nothing else."""

from __future__ import annotations

import re
import struct

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from hidden_addresses import ONE_STEP, Loading, check, hidden_scale, weighing
from loading import (
    ACT,
    IN,
    OUT,
    N,
    add,
    on_device,
    result,
    scale,
)
from small_graphs import floats, make_program, words

from offload.backends.captured.relocation.captures import NodeKind
from offload.backends.captured.relocation.fixed_values import FIXED_OWNER
from offload.timeline import Scheduling

VALUE_BYTES = 4 * N


def copies_of(run) -> list[tuple[int, bool]]:
    """(Value, whether it is copied in) of each copy that was added to the graph."""
    captured = run.captured_program
    nodes = captured.capture.nodes
    return [
        (word.value, word.offset_bytes == 0)
        for word in captured.discovery.words
        if nodes[word.node].kind is NodeKind.MEMCPY
    ]


@pytest.fixture
def load(device) -> Loading:
    return Loading(device)


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


def test_a_weight_that_is_named_stays_where_it_is(load, device):
    """Though its launch hides another address."""
    bound, step, weight = weighing(device, hides_weight=False)
    run = load(bound, [step])
    assert copies_of(run) == [(0, True)]
    for _ in range(3):
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), x * weight)


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

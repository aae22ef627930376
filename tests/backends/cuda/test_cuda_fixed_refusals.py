"""Values at fixed addresses: what is refused or unchanged, their memory, and whole models."""

from __future__ import annotations

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
from offload.program import Overlap

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import simulated_backend
from aten_kernel import AtenKernel
from budgets import Deep
from device_streaming import GIVEN, expected_of
from hidden_addresses import KEY, ONE_STEP, Loading, check, hidden_scale, weighing
from loading import (
    ACT,
    IN,
    OUT,
    N,
    add,
    on_device,
    scale,
)
from small_graphs import floats, make_program, words


@pytest.fixture
def load(device) -> Loading:
    return Loading(device)


def test_a_weight_that_is_hidden_is_refused(load, device):
    """Whatever else of its launch stays at one address, its own memory is the caller's."""
    bound, step, _ = weighing(device, hides_weight=True)
    with pytest.raises(CaptureError, match=r"parameter 1 .*[(]also where the inputs and results"):
        load(bound, [step])
    assert load.capturer.n_captures == 8


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


def test_what_no_value_explains_is_refused_and_leaves_nothing(load, device):
    """A number that differs in each layout, and relates to nothing that the launch uses."""
    kernel = device.simulator.kernel("hiding_kernel", [8, 8, 8], lambda _: None)

    def step(at):
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(0xAB_0000_0000 + at.layout))

    refused = ""
    before = device.simulator.physical_bytes, device.simulator.live("graph")
    gc.disable()
    try:
        try:
            load(make_program(*ONE_STEP), [step])
        except CaptureError as error:
            refused = str(error)
        assert (device.simulator.physical_bytes, device.simulator.live("graph")) == before
    finally:
        gc.enable()
    assert re.search(r"parameter 2 .*[(]also where the inputs and results", refused)
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

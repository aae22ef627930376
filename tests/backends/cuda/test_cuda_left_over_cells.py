"""Addresses of a generator's cells that are left over in arguments of kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import struct
import weakref

import pytest
import torch

import offload
from offload.program import Role

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from random_graphs import (
    INCREMENT,
    Device,
    N,
    PhiloxGenerator,
    RandomCapturer,
    Tail,
    load_plain,
    load_with,
    numbers,
    read_number,
)
from small_graphs import current_context, floats, make_program, words

from offload.backends.captured.relocation.captures import RANDOM_OWNER
from offload.backends.cuda import OwnedRange
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.graph import call


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    current_context()
    simulator.set_eager(True)
    monkeypatch.setattr(cuda_backend, "_arenas", weakref.WeakValueDictionary())
    return Device(simulator, monkeypatch)


@pytest.mark.parametrize("cell", [0, 1])
def test_a_cells_address_that_is_left_over_refuses_no_model_that_draws_nothing(device, cell):
    run = load_plain(device, Tail(device, lambda capturer: capturer.cells[cell]))
    assert torch.equal(run(torch.zeros(N))[0], torch.arange(N).float())


def test_a_cell_that_is_read_though_nothing_draws_is_found_by_the_proof(device):
    tail = Tail(device, lambda capturer: capturer.cells[0], is_read=True)
    where = "'padded_kernel'.* parameter 1 holds an address of a random generator's state"
    with pytest.raises(offload.CaptureError, match=f"{where}.* but the results depend on it"):
        load_plain(device, tail)


def test_a_state_that_no_launch_is_known_to_draw_from_is_refused_unproved(device):
    program = make_program([(Role.INPUT, N), (Role.OUTPUT, N)], [("0", "1")])
    capturer = RandomCapturer(())

    def step(at):
        state = words(*capturer.cells) + struct.pack("<II", 0, 1)
        at.launch(device.kernel, words(at.at[1]), state)

    capturer.steps = [step]
    with pytest.raises(offload.CaptureError, match="no launch is known to draw from"):
        load_with(device, program, capturer, verify=False)


@pytest.mark.parametrize("cell", [0, 1])
@pytest.mark.parametrize("is_read", [False, True])
def test_beside_random_kernels_a_single_word_gets_the_executables_own_cell(device, cell, is_read):
    """Read or not, it is the right one, whichever kernel comes first."""
    roles = [(Role.INPUT, N), (Role.OUTPUT, N), (Role.OUTPUT, N)]
    program = make_program(roles, [("0", "1"), ("0", "2")])
    plain, drawing = program.launches
    program = dataclasses.replace(
        program, launches=(plain, dataclasses.replace(drawing, random=True))
    )
    tail = Tail(device, lambda capturer: capturer.cells[cell], is_read)
    generator = PhiloxGenerator(seed=3, offset=8)
    capturer = RandomCapturer((), generator=generator)

    def draw(at):
        state = words(*capturer.cells) + struct.pack("<II", 0, 1)
        at.launch(device.kernel, words(at.at[2]), state)

    capturer.steps = [lambda at: tail.launch(at, capturer, at.at[1]), draw]
    run = load_with(device, program, capturer)
    for offset in (8, 8 + INCREMENT):
        first, second = run(torch.zeros(N))
        read = (3, offset)[cell] if is_read else 0
        assert torch.equal(first, torch.arange(N) + float(read))
        assert torch.equal(second, numbers(3, offset))


@pytest.mark.parametrize("before", [(1,), (0,), (0, 1), (1, 0, 1)])
def test_cells_left_over_just_before_the_state_refuse_no_model_that_draws(device, before):
    """In the same structure, as PhiloxCudaState is a member of the arguments of attention."""
    program = make_program([(Role.INPUT, N), (Role.OUTPUT, N)], [("0", "1")])
    (drawing,) = program.launches
    program = dataclasses.replace(program, launches=(dataclasses.replace(drawing, random=True),))
    generator = PhiloxGenerator(seed=3, offset=8)
    capturer = RandomCapturer((), generator=generator)
    n_left = len(before)

    def attend(block: bytes) -> None:
        result, *_, seed, offset, drawn, captured = struct.unpack(f"<{n_left + 4}QB7x", block)
        assert captured == 1
        for index, number in enumerate(numbers(read_number(seed), read_number(offset) + drawn)):
            floats(result, N)[index] = number

    kernel = device._simulator.kernel("attention_kernel", [8, 8 * n_left + 32], attend)

    def step(at):
        left = words(*(capturer.cells[one] for one in before))
        state = words(*capturer.cells, INCREMENT, 1)
        at.launch(kernel, words(at.at[1]), left + state)

    capturer.steps = [step]
    run = load_with(device, program, capturer)
    for offset in (8, 8 + INCREMENT):
        assert torch.equal(run(torch.zeros(N))[0], numbers(3, offset + INCREMENT))


def test_seed_and_offset_by_themselves_in_what_draws_are_refused(device):
    program = make_program([(Role.INPUT, N), (Role.OUTPUT, N)], [("0", "1")])
    (drawing,) = program.launches
    program = dataclasses.replace(program, launches=(dataclasses.replace(drawing, random=True),))
    capturer = RandomCapturer((), generator=PhiloxGenerator(seed=3))
    tail = Tail(device, lambda capturer: capturer.cells[0], is_read=True)
    capturer.steps = [lambda at: tail.launch(at, capturer, at.at[1])]
    with pytest.raises(offload.CaptureError, match="are not side by side"):
        load_with(device, program, capturer)


def test_a_cells_address_in_one_layout_and_the_hosts_in_others_is_noise(device):
    """Both captures of the first layout may get the same cells, one after the other."""
    host = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    program = make_program([(Role.INPUT, N), (Role.OUTPUT, N)], [("0", "1")])
    capturer = RandomCapturer(())
    own = call("cuMemAlloc", 512)
    order: list[int] = []

    def word_of(_) -> int:
        number = order[-1]
        return int(own) if number < 2 else address + 64 * number

    tail = Tail(device, word_of)
    capturer.steps = [lambda at: tail.launch(at, capturer, at.at[1])]
    original = RandomCapturer.capture

    def capture(self, bound, pool):
        order.append(self.number(pool))
        found = original(self, bound, pool)
        owned = [OwnedRange(int(own), 8, RANDOM_OWNER)] if order[-1] < 2 else found.owned
        return dataclasses.replace(found, owned=owned)

    device._monkeypatch.setattr(RandomCapturer, "capture", capture)
    run = load_with(device, program, capturer)
    assert torch.equal(run(torch.zeros(N))[0], torch.arange(N).float())

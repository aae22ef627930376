"""Kernels that get addresses in a form that only they can decode, and loads of them."""

from __future__ import annotations

import dataclasses
import struct

import torch
from loading import (
    IN,
    OUT,
    WEIGHT,
    Device,
    N,
    SimulatedBackend,
    on_device,
    result,
)
from small_graphs import StepCapturer, floats, make_program, words

from offload.program import Bindings, BoundProgram, TensorView

KEY = 0x5A5A_0F0F_3C3C_A5A5

ONE_STEP = ([(IN, N), (OUT, N)], [("0", "1")])


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

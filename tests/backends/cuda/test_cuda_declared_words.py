"""Kernels launched with known arguments: nothing in them needs an explanation."""

from __future__ import annotations

import dataclasses

import pytest

from offload.errors import CaptureError
from offload.program import BoundProgram, Role

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from small_graphs import StepCapturer, current_context, make_program, words

from offload.backends.captured.relocation.known_kernels import KnownKernels
from offload.backends.cuda.driver import is_known_address
from offload.backends.cuda.layouts import capture_once
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.prepared_graph import prepare_captured

IN, OUT = Role.INPUT, Role.OUTPUT
DECLARED = (0, 8)


def program():
    return make_program([(IN, 256), (OUT, 256)], [("0", "1")])


class DeclaringCapturer(StepCapturer):
    """Says that its kernels' first two arguments are the addresses."""

    def capture(self, bound, pool):
        found = super().capture(bound, pool)
        nodes = [dataclasses.replace(node, declared=DECLARED) for node in found.nodes]
        return dataclasses.replace(found, nodes=nodes)


@pytest.fixture
def pointers(simulator) -> int:
    """A kernel with two addresses and two numbers."""
    current_context()
    return simulator.kernel("add_kernel", [8, 8, 8, 8], lambda _: None)


def step(pointers, number):
    return lambda at: at.launch(
        pointers, words(at.at[0] + 16), words(at.at[1]), words(number(at)), words(5)
    )


def found_by_layouts(capturer):
    return prepare_captured(BoundProgram(program()), capturer, None).state.discovery


def test_a_number_may_look_like_the_drivers_memory(pointers):
    """Without the declaration it is an address that nobody owns."""
    with DeviceMemory(0) as memory:
        address = memory.allocate(4096)
        a_step = step(pointers, lambda _: address)
        with pytest.raises(CaptureError, match="neither the Program nor a known library owns"):
            found_by_layouts(StepCapturer([a_step]))
        capturer = DeclaringCapturer([a_step])
        found = found_by_layouts(capturer)
        assert capturer.n_captures == 4
        assert [(one.offset_bytes, one.value, one.value_offset_bytes) for one in found.words] == [
            (0, 0, 16),
            (8, 1, 0),
        ]
        assert (found.constants, found.noise, found.unexplained) == ((), (), ())
        once = capture_once(BoundProgram(program()), DeclaringCapturer([a_step]))
        assert KnownKernels().discovery_of(once.capture, 2, is_known_address) == found


def test_a_number_that_differs_is_refused(pointers):
    """What is no address was launched with other numbers: the launch did not declare it."""
    capturer = DeclaringCapturer([step(pointers, lambda at: at.number)])
    with pytest.raises(CaptureError, match=r"parameter 2 .* is a number of its launch"):
        found_by_layouts(capturer)


def test_an_address_that_stays_is_refused(pointers):
    def a_step(at):
        at.launch(pointers, words(1 << 40), words(at.at[1]), words(1), words(5))

    with pytest.raises(CaptureError, match=r"parameter 0 .* is not an address of its launch"):
        found_by_layouts(DeclaringCapturer([a_step]))
    once = capture_once(BoundProgram(program()), DeclaringCapturer([a_step]))
    assert KnownKernels().discovery_of(once.capture, 2, is_known_address) is None


def test_what_is_declared_teaches_nothing(pointers):
    capturer = DeclaringCapturer([step(pointers, lambda _: 1)])
    found = prepare_captured(BoundProgram(program()), capturer, None).state
    known = KnownKernels()
    known.learn(found.capture, found.discovery, [256, 256])
    assert len(known) == 0

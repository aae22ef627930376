"""Random kernels in simulated graphs, with a generator whose state lies in two cells."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import torch
from simulated_backend import SimulatedBackend
from small_graphs import StepCapturer, floats, make_program, words

from offload import Captured
from offload.backends.captured.random_draws import RandomState
from offload.backends.captured.relocation.captures import RANDOM_OWNER
from offload.backends.cuda import OwnedRange
from offload.backends.cuda.graph import call
from offload.load import options as load_options
from offload.program import Bindings, BoundProgram, Role, TensorView, Value

N = 16

INCREMENT = 4


class PhiloxGenerator:
    """Torch's CUDA generators as graphs see them: a seed, and an offset that draws advance."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self._cdata = id(self)
        self._seed = seed
        self._offset = offset

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset


def relaxed_mode():
    from cuda.bindings import driver

    return driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def numbers(seed: int, offset: int) -> torch.Tensor:
    """The numbers that the kernel draws."""
    return torch.arange(N) + 1000.0 * seed + 10 * offset


def read_number(address: int) -> int:
    return int.from_bytes(bytes(floats_as_bytes(address)), "little")


def floats_as_bytes(address: int) -> bytes:
    return bytes(memoryview(floats(address, 2)).cast("B"))


def random_kernel(block: bytes) -> None:
    """Reads seed and offset from the addresses in PhiloxCudaState, when it runs."""
    result, seed, offset, intragraph = struct.unpack("<3QI", block[:28])
    drawn = numbers(read_number(seed), read_number(offset) + intragraph)
    for index in range(N):
        floats(result, N)[index] = drawn[index]


@dataclasses.dataclass
class RandomCapturer(StepCapturer):
    """As in torch, each capture has separate memory for the generator's state.

    Attributes:
        in_capture: as torch 2.12 and later, which allocate it in the capture, in relaxed mode.
    """

    generator: PhiloxGenerator | None = None
    n_cells: int = 1
    in_capture: bool = False

    def make_cells(self) -> None:
        """Once in each capture."""
        if not self.cells:
            before = call("cuThreadExchangeStreamCaptureMode", relaxed_mode())
            self.cells = [int(call("cuMemAlloc", 512)) for _ in range(2 * self.n_cells)]
            call("cuThreadExchangeStreamCaptureMode", before)
            self.owned = [OwnedRange(address, 8, RANDOM_OWNER) for address in sorted(self.cells)]

    def capture(self, bound, pool):
        self.cells: list[int] = []
        if not self.in_capture:
            self.make_cells()
        state = None if self.generator is None else RandomState(self.generator, INCREMENT)
        return dataclasses.replace(super().capture(bound, pool), random=state)


class Device:
    def __init__(self, simulator, monkeypatch) -> None:
        self.kernel = simulator.kernel("distribution_kernel", [8, 24], random_kernel)
        self._simulator = simulator
        self._monkeypatch = monkeypatch

    def load(
        self,
        generator: PhiloxGenerator | None,
        n_launches: int = 1,
        n_cells: int = 1,
        weight: torch.Tensor | None = None,
        in_capture: bool = False,
        number: torch.Tensor | None = None,
    ):
        """An executable of this many random launches, each of which makes an output.

        `number` is a host constant, which no launch uses.
        """
        roles = [(Role.INPUT, N)] + [(Role.OUTPUT, N)] * n_launches
        held, bindings = [] if weight is None else [(Role.WEIGHT, N)], Bindings()
        program = make_program(
            [*roles, *held], [("0", str(index + 1)) for index in range(n_launches)]
        )
        if weight is not None:
            value = program.values[-1]
            view = TensorView(value.index, 0, value.shape, value.strides, value.dtype)
            program = dataclasses.replace(program, weight_views={value.index: (view,)})
            bindings = Bindings(weights={value.index: (weight,)})
        if number is not None:
            index, content = (
                len(program.values),
                bytes(number.reshape(1).view(torch.uint8).tolist()),
            )
            value = Value(index, Role.WEIGHT, (), (), "float32", 4, "number", content)
            view = TensorView(index, 0, (), (), "float32")
            program = dataclasses.replace(
                program, values=(*program.values, value), weight_views={index: (view,)}
            )
            bindings = Bindings(weights={index: (number,)})
        launches = tuple(dataclasses.replace(one, random=True) for one in program.launches)
        capturer = RandomCapturer((), generator=generator, n_cells=n_cells, in_capture=in_capture)
        capturer.steps = [self._step(capturer, index) for index in range(n_launches)]
        backend = SimulatedBackend(self._simulator, capturer)
        self._monkeypatch.setattr(load_options, "find_backend", lambda name: backend)
        program = dataclasses.replace(program, launches=launches, device="cpu")
        return Captured(BoundProgram(program, bindings)).load(backend.name)

    def _step(self, capturer: RandomCapturer, index: int):
        def step(at):
            capturer.make_cells()
            seed, offset = capturer.cells[2 * (index % capturer.n_cells) :][:2]
            state = words(seed, offset) + struct.pack("<II", INCREMENT * index, 1)
            at.launch(self.kernel, words(at.at[index + 1]), state)

        return step


@dataclasses.dataclass
class Tail:
    """A kernel that adds up numbers, or draws some, and has an uninitialised word."""

    device: Device
    word_of: Callable[[RandomCapturer], int]
    is_read: bool = False

    def __post_init__(self) -> None:
        self._kernel = self.device._simulator.kernel("padded_kernel", [8, 8], self._run)

    def launch(self, at, capturer: RandomCapturer, result: int) -> None:
        at.launch(self._kernel, words(result), words(self.word_of(capturer)))

    def _run(self, block: bytes) -> None:
        result, word = struct.unpack("<2Q", block)
        for index in range(N):
            floats(result, N)[index] = index + (read_number(word) if self.is_read else 0.0)


def load_plain(device: Device, tail: Tail, **options):
    """A program of one kernel that draws nothing."""
    program = make_program([(Role.INPUT, N), (Role.OUTPUT, N)], [("0", "1")])
    capturer = RandomCapturer(())
    capturer.steps = [lambda at: tail.launch(at, capturer, at.at[1])]
    return load_with(device, program, capturer, **options)


def load_with(device: Device, program, capturer: RandomCapturer, **options):
    backend = SimulatedBackend(device._simulator, capturer)
    device._monkeypatch.setattr(load_options, "find_backend", lambda name: backend)
    bound = BoundProgram(dataclasses.replace(program, device="cpu"))
    return Captured(bound).load(backend.name, **options)

"""Random kernels in a graph: each executable has its own cells for the generator's state."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import struct
import weakref
from collections.abc import Callable

import pytest
import torch

import offload
from offload import Captured
from offload.load import options as load_options
from offload.program import Bindings, BoundProgram, Role, TensorView, Value

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from simulated_backend import SimulatedBackend
from small_graphs import StepCapturer, current_context, floats, make_program, words

from offload.backends.captured.random_draws import RandomState
from offload.backends.captured.relocation.captures import RANDOM_OWNER
from offload.backends.cuda import OwnedRange
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.graph import call

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


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    current_context()
    simulator.set_eager(True)
    monkeypatch.setattr(cuda_backend, "_arenas", weakref.WeakValueDictionary())
    return Device(simulator, monkeypatch)


@pytest.mark.parametrize("in_capture", [False, True])
def test_each_execution_draws_on_from_where_the_generator_is(device, in_capture):
    """Whether torch makes a capture's cells before it, or in it and never fills them."""
    generator = PhiloxGenerator(seed=3, offset=8)
    run = device.load(generator, in_capture=in_capture)
    assert generator.get_offset() == 8  # loading and the proof draw nothing
    for turn in range(3):
        (got,) = run(torch.zeros(N))
        assert torch.equal(got, numbers(3, 8 + INCREMENT * turn))
    generator.set_offset(0)
    assert torch.equal(run(torch.zeros(N))[0], numbers(3, 0))
    assert generator.get_offset() == INCREMENT


def test_a_call_that_draws_writes_a_seed_and_an_offset(device, simulator):
    """Instead of the prologue of torch's replay; a call that draws nothing writes nothing."""
    drawing = device.load(PhiloxGenerator(seed=3))
    plain = load_plain(device, Tail(device, lambda capturer: capturer.cells[0]))
    for run, n_written in ((drawing, 2), (plain, 0)):
        simulator.forget_calls()
        for _ in range(3):
            run(torch.zeros(N))
        assert simulator.calls("cuStreamWriteValue64") == 3 * n_written
        assert simulator.calls("cuGraphLaunch") == 3
    assert plain._loaded.draw is None


def test_launches_draw_one_after_the_other(device):
    first, second = device.load(PhiloxGenerator(seed=2), n_launches=2)(torch.zeros(N))
    assert torch.equal(first, numbers(2, 0))
    assert torch.equal(second, numbers(2, INCREMENT))


def test_executables_do_not_share_cells(device, simulator):
    """Executions in flight on several executables draw from their own cells."""
    generator = PhiloxGenerator(seed=5)
    runs = [device.load(generator) for _ in range(2)]
    simulator.set_eager(False)
    results = [run(torch.zeros(N))[0] for _ in range(2) for run in runs]
    call("cuStreamSynchronize", 0)
    for turn, got in enumerate(results):
        assert torch.equal(got, numbers(5, INCREMENT * turn))


def test_submitted_executions_draw_in_the_order_of_submission(device):
    run = device.load(PhiloxGenerator(seed=1))
    tickets = [run.submit(torch.zeros(N)) for _ in range(4)]
    for turn, ticket in enumerate(tickets):
        assert torch.equal(ticket.result()[0], numbers(1, INCREMENT * turn))


def test_a_refused_call_draws_nothing(device):
    generator = PhiloxGenerator(seed=1)
    run = device.load(generator)
    with pytest.raises(offload.BindingError):
        run(torch.zeros(N + 1))
    assert generator.get_offset() == 0


@pytest.mark.parametrize("how", ["__call__", "submit"])
def test_a_call_with_another_host_constant_draws_nothing(device, how):
    """Generators advance only when a refusal is no longer possible."""
    generator, number = PhiloxGenerator(seed=1), torch.tensor(2.5)
    run = device.load(generator, number=number)
    number.fill_(2.0)
    with pytest.raises(offload.BindingError, match="number"):
        getattr(run, how)(torch.zeros(N))
    assert generator.get_offset() == 0
    number.fill_(2.5)
    (got,) = run(torch.zeros(N))
    assert torch.equal(got, numbers(1, 0))


@pytest.mark.parametrize("how", ["__call__", "submit"])
def test_a_call_with_a_swapped_weight_draws_nothing(device, how):
    generator, weight = PhiloxGenerator(seed=1), torch.zeros(N)
    run = device.load(generator, weight=weight)
    weight.data = torch.zeros(N)
    with pytest.raises(offload.BindingError, match="weight2: its storage was swapped"):
        getattr(run, how)(torch.zeros(N))
    assert generator.get_offset() == 0
    run.rebind_weights()
    assert torch.equal(run(torch.zeros(N))[0], numbers(1, 0))
    assert generator.get_offset() == INCREMENT


def test_the_cells_are_given_back(device, simulator):
    before = simulator.live_bytes
    run = device.load(PhiloxGenerator(seed=1))
    captured_bytes = 512 * 2 * 4  # of the four captures, which this test never frees
    assert simulator.live_bytes - before > captured_bytes
    run.close()
    assert simulator.live_bytes - before == captured_bytes


def test_unknown_state_is_refused(device):
    with pytest.raises(offload.CaptureError, match=r"model.py:1.*draws random numbers"):
        device.load(None)


def test_several_states_are_refused(device):
    with pytest.raises(offload.CaptureError, match="distribution_kernel: it reads the state"):
        device.load(PhiloxGenerator(seed=1), n_launches=2, n_cells=2)


# ---- leftovers of the kernels that fill the cells ------------------------------------------------


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

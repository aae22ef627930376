"""Random kernels in a graph: each executable has cells of its own for the generator's state."""

from __future__ import annotations

import dataclasses
import struct
import weakref

import pytest
import torch

import offload
from offload import Captured, load
from offload.program import Role, TensorView

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from simulated_backend import SimulatedBackend
from small_graphs import StepCapturer, current_context, floats, make_program, words

from offload.backends.cuda import OwnedRange
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.graph import call
from offload.backends.random_draws import RandomState
from offload.backends.relocation.captures import RANDOM_OWNER

N = 16
INCREMENT = 4


class PhiloxGenerator:
    """What torch's CUDA generators are to a graph: a seed, and an offset that draws move."""

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


def numbers(seed: int, offset: int) -> torch.Tensor:
    """What the kernel draws."""
    return torch.arange(N) + 1000.0 * seed + 10 * offset


def read_number(address: int) -> int:
    return int.from_bytes(bytes(floats_as_bytes(address)), "little")


def floats_as_bytes(address: int) -> bytes:
    return bytes(memoryview(floats(address, 2)).cast("B"))


def random_kernel(block: bytes) -> None:
    """Reads seed and offset where PhiloxCudaState says, when it runs."""
    result, seed, offset, intragraph = struct.unpack("<3QI", block[:28])
    drawn = numbers(read_number(seed), read_number(offset) + intragraph)
    for index in range(N):
        floats(result, N)[index] = drawn[index]


@dataclasses.dataclass
class RandomCapturer(StepCapturer):
    """As torch does, each capture has memory of its own for the generator's state."""

    generator: PhiloxGenerator | None = None
    n_cells: int = 1

    def capture(self, program, pool):
        self.cells = [int(call("cuMemAlloc", 512)) for _ in range(2 * self.n_cells)]
        self.owned = [OwnedRange(address, 8, RANDOM_OWNER) for address in sorted(self.cells)]
        state = None if self.generator is None else RandomState(self.generator, INCREMENT)
        return dataclasses.replace(super().capture(program, pool), random=state)


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
    ):
        """An executable of so many random launches, each of which makes an output."""
        roles = [(Role.INPUT, N)] + [(Role.OUTPUT, N)] * n_launches
        held = [] if weight is None else [(Role.WEIGHT, N)]
        program = make_program(
            [*roles, *held], [("0", str(index + 1)) for index in range(n_launches)]
        )
        if weight is not None:
            value = program.values[-1]
            view = TensorView(value.index, 0, value.shape, value.strides, value.dtype)
            program = dataclasses.replace(
                program, weights={value.index: (weight,)}, weight_views={value.index: (view,)}
            )
        launches = tuple(dataclasses.replace(one, random=True) for one in program.launches)
        capturer = RandomCapturer((), generator=generator, n_cells=n_cells)
        capturer.steps = [self._step(capturer, index) for index in range(n_launches)]
        backend = SimulatedBackend(self._simulator, capturer)
        self._monkeypatch.setattr(load, "find_backend", lambda name: backend)
        program = dataclasses.replace(program, launches=launches, device="cpu")
        return Captured(program).load(backend.name)

    def _step(self, capturer: RandomCapturer, index: int):
        def step(at):
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


def test_each_execution_draws_on_from_where_the_generator_is(device):
    generator = PhiloxGenerator(seed=3, offset=8)
    run = device.load(generator)
    assert generator.get_offset() == 8  # loading and the proof draw nothing
    for turn in range(3):
        (got,) = run(torch.zeros(N))
        assert torch.equal(got, numbers(3, 8 + INCREMENT * turn))
    generator.set_offset(0)
    assert torch.equal(run(torch.zeros(N))[0], numbers(3, 0))
    assert generator.get_offset() == INCREMENT


def test_launches_draw_one_after_the_other(device):
    first, second = device.load(PhiloxGenerator(seed=2), n_launches=2)(torch.zeros(N))
    assert torch.equal(first, numbers(2, 0))
    assert torch.equal(second, numbers(2, INCREMENT))


def test_executables_do_not_share_cells(device, simulator):
    """Executions in flight on several executables draw what each was given."""
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
    with pytest.raises(offload.CaptureError, match="distribution_kernel: it finds the state"):
        device.load(PhiloxGenerator(seed=1), n_launches=2, n_cells=2)

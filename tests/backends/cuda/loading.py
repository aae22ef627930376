"""Programs of simulated kernels, loaded by the CUDA backend on the simulated driver.

Needs cuda-bindings; a module that imports this skips without them.
"""

from __future__ import annotations

import ctypes
import struct
import weakref

import torch
from small_graphs import StepCapturer, current_context, floats, make_program, words

from offload import Captured
from offload.backends.cuda import CudaBackend, backend
from offload.backends.cuda.graph import call
from offload.load import options as load_options
from offload.plan.topology import CopyCosts
from offload.program import BoundProgram, Program, Role

IN, ACT, OUT, WEIGHT = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.WEIGHT
N = 128  # elements of every Value


class SimulatedBackend(CudaBackend):
    """Takes tensors of the CPU: the simulated device's memory is the host's."""

    def tensor_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, index: int) -> int:
        return 0

    def copy_costs(self, index: int, resident: object) -> CopyCosts:
        """Not measured, so that every run decides the same: a copy never pays."""
        return CopyCosts(1.0, 1e9, 0.0, 0.0)


class Device:
    """The simulator, two kernels, and the latest capture."""

    def __init__(self, simulator, monkeypatch) -> None:
        current_context()
        self.simulator = simulator
        simulator.set_host_is_device(True)
        self.add = simulator.kernel("add_kernel", [8, 8, 8], add_floats)
        self.scale = simulator.kernel("scale_kernel", [8, 8, 4], scale_floats)
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(backend, "_arenas", weakref.WeakValueDictionary())

    def load(
        self,
        program: Program | BoundProgram,
        steps,
        capturer=None,
        backend=SimulatedBackend,
        **options,
    ):
        bound = program if isinstance(program, BoundProgram) else BoundProgram(program)
        simulated = backend(capturer or StepCapturer(steps))
        self._monkeypatch.setattr(load_options, "find_backend", lambda name: simulated)
        return Captured(bound).load("cuda", **options)


def add_floats(arguments: bytes) -> None:
    one, other, result = struct.unpack("<3Q", arguments)
    for index in range(N):
        floats(result, N)[index] = floats(one, N)[index] + floats(other, N)[index]


def scale_floats(arguments: bytes) -> None:
    source, result, factor = struct.unpack("<2Qf", arguments)
    for index in range(N):
        floats(result, N)[index] = floats(source, N)[index] * factor


def scale(at, device, source, result, factor):
    at.launch(device.scale, words(source), words(result), struct.pack("<f", factor))


def add(at, device, one, other, result):
    at.launch(device.add, words(one), words(other), words(result))


def chain(device):
    """out = ((x * 2) + x) * 3 through scratch memory: three launches, four nodes."""
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
    """The same numbers in the simulated device's memory, valid until its reset."""
    n_bytes = content.numel() * 4
    address = int(call("cuMemAlloc", n_bytes))
    copy = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=torch.float32)
    return copy.copy_(content)


def result(run, x):
    (y,) = run(x, out=(on_device(torch.zeros(N)),))
    run._loaded.resident.finish()
    return y

"""A process group and kernels on a virtual clock, and random programs with both.

Time passes only in executions: when a kernel is called, or a collective started or waited for. No
plan is consulted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import offload
from offload.backends import find_backend
from offload.load.place import place
from offload.plan.collective_lanes import CollectiveTimes
from offload.program import (
    BoundProgram,
    Group,
    Kernel,
    KernelFunction,
    Launch,
    Operator,
    Program,
    TensorView,
    check_program,
)
from offload.program.slice import slice_program
from offload.run import Executable

NUMBERS = 16
KERNEL = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))


class VirtualClock:
    """The time that executions have taken so far, in ns."""

    def __init__(self, seed: int, jitter: float) -> None:
        self.now_ns = 0.0
        self._jitter = jitter
        self._draws = random.Random(seed)

    def jittered(self, duration_ns: float) -> float:
        """A duration with random jitter."""
        return duration_ns * self._draws.uniform(1 - self._jitter, 1 + self._jitter)


class VirtualWork(torch._C._distributed_c10d.Work):
    """A work handle: the tensors hold the sum only after the wait."""

    def __init__(self, clock: VirtualClock, end_ns: float, tensor: torch.Tensor) -> None:
        super().__init__()
        self._clock, self._end_ns = clock, end_ns
        self._tensor, self._sum = tensor, 2 * tensor
        tensor.fill_(float("nan"))

    def wait(self, timeout: Any = None) -> bool:
        self._clock.now_ns = max(self._clock.now_ns, self._end_ns)
        self._tensor.copy_(self._sum)
        return True


class VirtualGroup(dist.ProcessGroup):
    """Two ranks with equal tensors, of which this process is the first.

    A collective takes the stated time once the one before has ended.
    """

    def __init__(self, name: str, clock: VirtualClock, durations_ns: Sequence[float]) -> None:
        super().__init__(0, 2)
        self._clock, self._durations_ns = clock, durations_ns
        self._free_ns = 0.0
        self._works: list[VirtualWork] = []
        self.n_started = 0
        torch._C._distributed_c10d._register_process_group(name, self)

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "virtual"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> VirtualWork:
        duration_ns = self._durations_ns[self.n_started % len(self._durations_ns)]
        self.n_started += 1
        begin_ns = max(self._clock.now_ns, self._free_ns)
        self._free_ns = begin_ns + self._clock.jittered(duration_ns)
        work = VirtualWork(self._clock, self._free_ns, tensors[0])
        self._works.append(work)
        return work


@dataclasses.dataclass
class VirtualProgram:
    """A random program, its durations on the virtual clock, and its result.

    Attributes:
        bound: kernels and collectives.
        times: as stated; an execution differs from them by the clock's jitter.
        callbacks: keep the kernels' code.
    """

    bound: BoundProgram
    times: CollectiveTimes
    clock: VirtualClock
    group: VirtualGroup
    callbacks: list[Any]

    def executable(self, program: Program) -> Executable:
        """The launches in a program's order, proved."""
        backend = find_backend("cpu")
        prepared = backend.prepare(dataclasses.replace(self.bound, program=program))
        run = Executable(prepared, place(prepared, backend), backend)
        run(*self.inputs())
        return run

    def inputs(self) -> list[torch.Tensor]:
        return [torch.arange(float(NUMBERS)), torch.ones(NUMBERS)]

    def makespan_ns(self, run: Executable) -> tuple[float, torch.Tensor]:
        """Return the duration of an execution on the virtual clock, and its result."""
        begin_ns = self.clock.now_ns
        result = run(*self.inputs())
        return self.clock.now_ns - begin_ns, result


def random_steps(seed: int) -> Any:
    """A function of two tensors; sinh stands for a sum over ranks."""
    draws = random.Random(seed)
    steps = [
        (draws.choice(["add", "mul", "relu", "sinh", "sinh"]), draws.random(), draws.random())
        for _ in range(draws.randint(8, 40))
    ]

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pool = [x, y]
        for kind, first, second in steps:
            a, b = pool[int(first * len(pool))], pool[int(second * len(pool))]
            if kind in ("add", "mul"):
                pool.append(getattr(torch, kind)(a, b))
            else:
                pool.append(getattr(torch, kind)(a))
        return torch.stack(pool[2:]).sum(0)

    return call


def virtual_program(seed: int, jitter: float = 0.0) -> VirtualProgram:
    """Random launches, and sums over two ranks among them."""
    draws = random.Random(seed)
    recorded = offload.capture(
        random_steps(seed), torch.arange(float(NUMBERS)), torch.ones(NUMBERS)
    )
    clock, name = VirtualClock(seed, jitter), f"virtual{seed}"
    made = _Made(recorded.bound, clock, name, draws)
    for launch in recorded.program.launches:
        made.add(launch)
    sums = [ns for ns in made.transfer_ns if ns]
    group = VirtualGroup(name, clock, sums or [0.0])
    program = dataclasses.replace(
        recorded.program,
        launches=tuple(made.launches),
        groups=(Group(name, (0, 1), 0, 2),) * bool(sums),
    )
    check_program(program)
    bindings = dataclasses.replace(recorded.bound.bindings, kernels=tuple(made.functions))
    times = CollectiveTimes(tuple(made.launch_ns), tuple(made.transfer_ns))
    return VirtualProgram(BoundProgram(program, bindings), times, clock, group, made.callbacks)


class _Made:
    """The launches of a virtual program as they are added."""

    def __init__(
        self, bound: BoundProgram, clock: VirtualClock, group: str, draws: random.Random
    ) -> None:
        self._bound, self._clock, self._group, self._draws = bound, clock, group, draws
        self.launches: list[Launch] = []
        self.launch_ns: list[float] = []
        self.transfer_ns: list[float] = []
        self.functions: list[KernelFunction] = []
        self.callbacks: list[Any] = []

    def add(self, launch: Launch) -> None:
        if launch.name.startswith("aten::sinh"):
            self._add_sum(launch)
        else:
            self._add_kernel(launch)

    def _add_sum(self, launch: Launch) -> None:
        (view,), (made,) = list(launch.views()), list(launch.made())
        start = dataclasses.replace(
            launch,
            index=len(self.launches),
            callee=Operator("_c10d_functional::all_reduce"),
            arguments=(view, "sum", self._group),
        )
        self._append(start, 0.0, self._draws.uniform(10_000, 200_000))
        wait = dataclasses.replace(
            launch,
            index=len(self.launches),
            callee=Operator("_c10d_functional::wait_tensor"),
            arguments=(made,),
            results=(None,),
            reads=tuple(sorted({view.value, made.value})),
            writes=(made.value,),
        )
        self._append(wait, 0.0, 0.0)

    def _add_kernel(self, launch: Launch) -> None:
        replaced = slice_program(self._bound, [launch.index]).bound.program
        views = [
            _whole(self._bound.program, one)
            for one in dict.fromkeys(view.value for view in launch.views())
        ]
        duration_ns = self._draws.uniform(5_000, 100_000)
        kernel = Kernel(len(self.functions), replaced)
        self._append(
            dataclasses.replace(
                launch, index=len(self.launches), callee=kernel, arguments=tuple(views)
            ),
            duration_ns,
            0.0,
        )
        callback = KERNEL(_kernel(launch, self._clock, duration_ns))
        self.callbacks.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        assert address is not None
        self.functions.append(KernelFunction(address, lambda _: True))

    def _append(self, launch: Launch, launch_ns: float, transfer_ns: float) -> None:
        self.launches.append(launch)
        self.launch_ns.append(launch_ns)
        self.transfer_ns.append(transfer_ns)


def _whole(program: Program, value: int) -> TensorView:
    one = program.values[value]
    return TensorView(value, 0, one.shape, one.strides, one.dtype)


def _kernel(launch: Launch, clock: VirtualClock, duration_ns: float) -> Any:
    """Code that computes a launch and advances the virtual clock by its duration."""
    name = launch.name.removeprefix("aten::").partition(".")[0]
    order = list(dict.fromkeys(view.value for view in launch.views()))
    given = [order.index(view.value) for view in launch.views()]
    (made,) = list(launch.made())
    sizes = [int(np.prod(view.shape)) for view in launch.views()]
    n_made = int(np.prod(made.shape))

    def called(words: Any) -> None:
        clock.now_ns += clock.jittered(duration_ns)
        inputs = [_numbers(words[at], size) for at, size in zip(given, sizes, strict=True)]
        out = _numbers(words[len(order)], n_made)
        if name == "add":
            out[:] = inputs[0] + inputs[1]
        elif name == "mul":
            out[:] = inputs[0] * inputs[1]
        elif name == "relu":
            out[:] = np.maximum(inputs[0], 0)
        elif name == "sum":
            out[:] = inputs[0].reshape(-1, NUMBERS).sum(0)
        else:
            assert name in ("stack", "cat"), name
            out[:] = np.concatenate(inputs)

    return called


def _numbers(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))

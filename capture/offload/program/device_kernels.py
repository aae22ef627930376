"""Compiled kernels of a device, and the order in which a launch runs them, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter that is an address: of a word of the launch, plus an offset.

    `word` counts the Values of the launch: those that it takes, then those that it makes.
    """

    word: int
    offset_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is an integer of `size_bytes`, two's complement."""

    value: int
    size_bytes: int


Parameter = Pointer | Number


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceKernel:
    """One compiled kernel.

    Attributes:
        name: of its function in the code, unique to its source and configuration.
        code: what the device's driver loads.
        n_threads: of each block.
        shared_bytes: of dynamic shared memory that each block takes.
        n_hidden: parameters of eight bytes that its compiler appended, all of them 0.
        source: what it was compiled from: a Python module that defines the function with Triton.
        constants: the parameters in the source that are compiled in, by name.
        kinds: the types of the others, in order, as Triton writes them.
    """

    name: str
    code: bytes
    n_threads: int
    shared_bytes: int
    n_hidden: int
    source: str
    constants: Mapping[str, object]
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceCall:
    """One launch of a kernel by a device's driver; `grid` counts blocks in x, y and z."""

    kernel: DeviceKernel
    grid: tuple[int, int, int]
    parameters: tuple[Parameter, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFunction:
    """What a device runs for a launch of a kernel: these calls, each behind the one before.

    Attributes:
        calls: in order.
        prove: compares what the calls have made with the launches that they replace. It takes the
            tensors of the launch's inputs and those of its results; a failure is a text, and empty
            if there is none. A kernel that replaces nothing has nothing to be compared with.
    """

    calls: tuple[DeviceCall, ...]
    prove: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], str] = lambda _given, _made: (
        ""
    )

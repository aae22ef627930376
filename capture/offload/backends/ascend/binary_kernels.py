"""Kernels of one's own, as a compiler left them: by name, grid and argument layout."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload.backends.ascend.kernels import Address, GatherKernel, Kernel, KernelCapture
from offload.errors import CaptureError, FileError
from offload.native import _native
from offload.program import Launch, Program, TensorView, contiguous_strides, same_strides

ADDRESS_BYTES = 8
_NUMBERS = {"i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The address of a tensor that the launch is given; eight bytes.

    Attributes:
        index: of the launch's tensor arguments, in the order of its schema, lists spread out.
        dtype: that the kernel takes, as torch names it ("float32").
    """

    index: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """The address of a tensor that the launch makes; eight bytes.

    Attributes:
        index: of the launch's results.
        dtype: that the kernel writes, as torch names it.
    """

    index: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number that stays as it is at the load.

    Attributes:
        format: as `struct` has it: "i", "I" (four bytes), "q", "Q" (eight), "f" or "d".
        value: the number, or what it is for a launch, whose shapes are known.
    """

    format: str
    value: int | float | Callable[[Launch], int | float]


@dataclasses.dataclass(frozen=True, slots=True)
class BinaryKernel:
    """How a kernel of a binary is launched for an operator.

    Attributes:
        name: of the kernel in the binary.
        n_blocks: on how many cores' worth of blocks it runs, or on how many for a launch.
        arguments: its argument block, in order, each at a multiple of its own size, as the
            structure of these in C.
        takes_strides: tensors may lie in any strides; else only in a row.
    """

    name: str
    n_blocks: int | Callable[[Launch], int]
    arguments: tuple[Given | Made | Number, ...]
    takes_strides: bool = False


class BinaryCapturer:
    """Implements the Ascend backend's Capturer by the kernels of one binary.

    `captured.load(device=AscendBackend(BinaryCapturer(...)))`; see docs/guides/own_kernels.md.
    """

    def __init__(
        self,
        binary: Path | bytes,
        kernels: Mapping[str, BinaryKernel | Sequence[BinaryKernel]],
        *,
        gather: tuple[str, int] | None = None,
    ) -> None:
        """A capturer that reads nothing yet.

        Args:
            binary: the file that a compiler of kernels made, or its bytes.
            kernels: by the name of an operator ("aten::relu") what is launched for it, one after
                the other.
            gather: name and blocks of a kernel that refreshes argument tables; see `GatherKernel`.
        """
        self._binary = binary
        self._kernels = {
            name: (one,) if isinstance(one, BinaryKernel) else tuple(one)
            for name, one in kernels.items()
        }
        self._gather = gather

    def capture(self, program: Program, device: int) -> KernelCapture:
        """Give the kernels of every launch.

        Raises:
            CaptureError: no kernel is named for a launch's operator, or one that is does not fit
                the launch: a tensor that it has not, of another dtype, in strides that it does not
                take, or on the host; a number that its format does not hold; no blocks.
            FileError: the binary cannot be read.
            ExecutionError: the runtime does not load the binary, or finds no kernel of a name.
        """
        self._require_kernels(program)
        binary = self._load(device)
        kernels = [
            _kernel(program, launch, one, binary.function(one.name))
            for launch in program.launches
            for one in self._kernels[launch.name]
        ]
        return KernelCapture(kernels, keep=binary)

    def gather_kernel(self, device: int) -> GatherKernel | None:
        """The kernel that was named for it.

        Raises:
            FileError, ExecutionError: as `capture`.
        """
        if self._gather is None:
            return None
        name, n_blocks = self._gather
        binary = self._load(device)
        return GatherKernel(binary.function(name), n_blocks, binary)

    def _require_kernels(self, program: Program) -> None:
        for launch in program.launches:
            if launch.name not in self._kernels:
                raise CaptureError(
                    f"{launch.place}: no kernel was named for {launch.name}; there are some for "
                    f"{', '.join(sorted(self._kernels)) or 'none'}: add it to kernels="
                )

    def _load(self, device: int) -> _native.AscendBinary:
        if isinstance(self._binary, bytes):
            return _native.AscendBinary(device, self._binary)
        try:
            content = self._binary.read_bytes()
        except OSError as error:
            raise FileError(f"the binary of kernels cannot be read: {error}") from error
        return _native.AscendBinary(device, content)


def _kernel(program: Program, launch: Launch, one: BinaryKernel, function: int) -> Kernel:
    block, addresses = bytearray(), []
    for argument in one.arguments:
        if isinstance(argument, Number):
            _append(block, _number(launch, one, argument))
            continue
        view = _view(program, launch, one, argument)
        _append(block, bytes(ADDRESS_BYTES))
        addresses.append(Address(len(block) - ADDRESS_BYTES, view.value, view.offset_bytes))
    n_blocks = one.n_blocks(launch) if callable(one.n_blocks) else one.n_blocks
    if n_blocks < 1:
        raise CaptureError(
            f"{_what(launch, one)} runs on {n_blocks} blocks: at least one is needed"
        )
    block += bytes(-len(block) % ADDRESS_BYTES)
    return Kernel(function, n_blocks, bytes(block), tuple(addresses), launch.index)


def _append(block: bytearray, content: bytes) -> None:
    block += bytes(-len(block) % len(content))
    block += content


def _number(launch: Launch, one: BinaryKernel, argument: Number) -> bytes:
    if argument.format not in _NUMBERS:
        raise CaptureError(
            f"{_what(launch, one)} has a number of format {argument.format!r}: expected one of "
            f"{', '.join(_NUMBERS)}"
        )
    value = argument.value(launch) if callable(argument.value) else argument.value
    try:
        return struct.pack(f"<{argument.format}", value)
    except (struct.error, OverflowError) as error:
        raise CaptureError(
            f"{_what(launch, one)} is given {value!r} as a number of format {argument.format!r}: "
            f"{error}"
        ) from error


def _view(
    program: Program, launch: Launch, one: BinaryKernel, argument: Given | Made
) -> TensorView:
    kind = "given" if isinstance(argument, Given) else "made"
    views = tuple(launch.views()) if isinstance(argument, Given) else launch.results
    view = views[argument.index] if 0 <= argument.index < len(views) else None
    if view is None:
        raise CaptureError(
            f"{_what(launch, one)} takes tensor {argument.index} that is {kind}, which there is "
            f"not: {launch}"
        )
    value = program.values[view.value]
    if problem := _problem(view, one, argument.dtype, on_host=value.on_host):
        raise CaptureError(f"{_what(launch, one)}: {value.name}, which it is {kind}, {problem}")
    return view


def _problem(view: TensorView, one: BinaryKernel, dtype: str, *, on_host: bool) -> str:
    """Why the kernel does not take the view; empty: it does."""
    if on_host:
        return "is a constant of the host"
    if view.dtype != dtype:
        return f"is of {view.dtype}, not {dtype}"
    if view.conjugate or view.negative:
        return "is conjugated or negated lazily"
    in_a_row = same_strides(view.shape, view.strides, contiguous_strides(view.shape))
    if not one.takes_strides and not in_a_row:
        return (
            f"has strides {view.strides} at shape {view.shape}, and it takes tensors in a row "
            "alone (takes_strides=True says otherwise)"
        )
    return ""


def _what(launch: Launch, one: BinaryKernel) -> str:
    return f"{launch.place}: kernel {one.name} of {launch.name}"

"""Custom kernels as compiled: by name, grid and argument layout."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload.backends.ascend.kernels import (
    Address,
    GatherKernel,
    Kernel,
    KernelCapture,
    OwnAddress,
)
from offload.errors import CaptureError, FileError
from offload.native import _native
from offload.program import Launch, Program, TensorView, contiguous_strides, same_strides

ADDRESS_BYTES = 8
_NUMBERS = {"i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The address of an input tensor of the launch; eight bytes.

    Attributes:
        index: of the launch's tensor arguments, in the order of its schema, lists flattened.
        dtype: that the kernel takes, by torch's name ("float32").
    """

    index: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """The address of a result of the launch; eight bytes.

    Attributes:
        index: of the launch's results.
        dtype: that the kernel writes, by torch's name.
    """

    index: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number that is fixed at load.

    Attributes:
        format: of `struct`: "i", "I" (four bytes), "q", "Q" (eight), "f" or "d".
        value: the number, or a function that returns it for a launch with known shapes.
    """

    format: str
    value: int | float | Callable[[Launch], int | float]


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """The address of the kernel's tiling data, which follow its arguments; eight bytes.

    Attributes:
        most_bytes: the maximum that `BinaryKernel.tile` returns.
    """

    most_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class BinaryKernel:
    """How a kernel of a binary is launched for an operator.

    Functions receive the launch at the sizes of the execution, also on threads of offload. They
    depend only on the launch: their results are kept with the sizes.

    Attributes:
        name: of the kernel in the binary.
        n_blocks: the number of blocks, or a function that returns it for a launch. At varying sizes
            0 where the launch makes no element: then it is not launched.
        arguments: its argument block, in order, each at a multiple of its own size, as in a C
            structure.
        takes_strides: tensors may have any strides; else they must be contiguous.
        tile: returns the tiling data for a launch, as the kernel reads them; where `arguments` has
            a `Tiling`. They begin at a multiple of 8 bytes of the argument block.
    """

    name: str
    n_blocks: int | Callable[[Launch], int]
    arguments: tuple[Given | Made | Number | Tiling, ...]
    takes_strides: bool = False
    tile: Callable[[Launch], bytes] | None = None


class BinaryCapturer:
    """Implements the Ascend backend's Capturer with the kernels of one binary.

    `captured.load(device=AscendBackend(BinaryCapturer(...)))`; see docs/guides/own_kernels.md.
    """

    def __init__(
        self,
        binary: Path | bytes,
        kernels: Mapping[str, BinaryKernel | Sequence[BinaryKernel]],
        *,
        gather: tuple[str, int] | None = None,
    ) -> None:
        """Keep the descriptions; reads no file yet.

        Args:
            binary: the output file of a kernel compiler, or its bytes.
            kernels: by the name of an operator ("aten::relu") the kernels that are launched for it,
                in order.
            gather: name and blocks of a kernel that refreshes argument tables; see `GatherKernel`.
        """
        self._binary = binary
        self._kernels = {
            name: (one,) if isinstance(one, BinaryKernel) else tuple(one)
            for name, one in kernels.items()
        }
        self._gather = gather

    @property
    def sized(self) -> BinaryCapturer:
        """Itself: grids, numbers and tiling data are functions of the launch."""
        return self

    def at(self, program: Program, launch: Launch) -> tuple[Kernel, ...]:
        """Return the kernels of one launch at other sizes; see `SizedKernels`.

        Raises:
            CaptureError: a kernel does not fit the launch at these sizes, as for `capture`.
        """
        is_empty = all(0 in view.shape for view in launch.made()) and _writes_nothing(launch)
        return tuple(
            _kernel(program, launch, one, 0, least_blocks=0 if is_empty else 1)
            for one in self._kernels[launch.name]
        )

    def capture(self, program: Program, device: int) -> KernelCapture:
        """Return the kernels of every launch.

        Raises:
            CaptureError: no kernel is named for a launch's operator, or a kernel does not fit the
                launch: the tensor does not exist, has another dtype, unsupported strides, or lies
                on the host; a number exceeds its format; there are no blocks.
            FileError: the binary cannot be read.
            ExecutionError: the runtime does not load the binary, or does not find a named kernel.
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
        """Return the kernel that was named for it.

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
                    f"{launch.place}: no kernel was given for {launch.name}; kernels= has kernels "
                    f"for {', '.join(sorted(self._kernels)) or 'none'}: add one"
                )

    def _load(self, device: int) -> _native.AscendBinary:
        if isinstance(self._binary, bytes):
            return _native.AscendBinary(device, self._binary)
        try:
            content = self._binary.read_bytes()
        except OSError as error:
            raise FileError(f"the binary of kernels cannot be read: {error}") from error
        return _native.AscendBinary(device, content)


def _writes_nothing(launch: Launch) -> bool:
    """Whether a launch writes only its results."""
    return set(launch.writes) <= {view.value for view in launch.made()}


def _kernel(
    program: Program, launch: Launch, one: BinaryKernel, function: int, *, least_blocks: int = 1
) -> Kernel:
    block, addresses, tilings = bytearray(), [], []
    for argument in one.arguments:
        if isinstance(argument, Number):
            _append(block, _number(launch, one, argument))
            continue
        _append(block, bytes(ADDRESS_BYTES))
        at = len(block) - ADDRESS_BYTES
        if isinstance(argument, Tiling):
            tilings.append((at, argument))
        else:
            view = _view(program, launch, one, argument)
            addresses.append(Address(at, view.value, view.offset_bytes))
    n_blocks = one.n_blocks(launch) if callable(one.n_blocks) else one.n_blocks
    if n_blocks < least_blocks:
        raise CaptureError(f"{_what(launch, one)}: expected at least one block, got {n_blocks}")
    block += bytes(-len(block) % ADDRESS_BYTES)
    own = []
    most_bytes = len(block)
    if tiling := _tiling_data(launch, one, [argument for _, argument in tilings]):
        (at, argument), content = tilings[0], tiling[0]
        own.append(OwnAddress(at, len(block)))
        most_bytes += argument.most_bytes + -argument.most_bytes % ADDRESS_BYTES
        block += content + bytes(-len(content) % ADDRESS_BYTES)
    return Kernel(
        function,
        n_blocks,
        bytes(block),
        tuple(addresses),
        launch.index,
        own_addresses=tuple(own),
        most_bytes=most_bytes,
    )


def _tiling_data(
    launch: Launch, one: BinaryKernel, tilings: Sequence[Tiling]
) -> tuple[bytes] | None:
    """Return the result of `tile`; None where the kernel takes no tiling data."""
    if one.tile is None and not tilings:
        return None
    if one.tile is None or len(tilings) != 1:
        raise CaptureError(
            f"{_what(launch, one)} has {len(tilings)} arguments that are Tiling and "
            f"{'no' if one.tile is None else 'a'} function tile: expected one of each, or neither"
        )
    content = one.tile(launch)
    if not isinstance(content, (bytes, bytearray)):
        raise CaptureError(
            f"{_what(launch, one)}: its function tile returned {content!r}: expected bytes"
        )
    if len(content) > tilings[0].most_bytes:
        raise CaptureError(
            f"{_what(launch, one)} is given {len(content)} bytes of tiling data: expected at most "
            f"{tilings[0].most_bytes}: give Tiling more, or return less from tile"
        )
    return (bytes(content),)


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
            f"{_what(launch, one)} takes tensor {argument.index} that is {kind}, which does not "
            f"exist: {launch}"
        )
    value = program.values[view.value]
    if problem := _problem(view, one, argument.dtype, on_host=value.on_host):
        raise CaptureError(
            f"{_what(launch, one)}: {value.name}, a tensor that is {kind}, {problem}"
        )
    return view


def _problem(view: TensorView, one: BinaryKernel, dtype: str, *, on_host: bool) -> str:
    """Return why the kernel does not take the view; empty if it does."""
    if on_host:
        return "is a constant on the host"
    if view.dtype != dtype:
        return f"is of {view.dtype}, not {dtype}"
    if view.conjugate or view.negative:
        return "is conjugated or negated lazily"
    in_a_row = same_strides(view.shape, view.strides, contiguous_strides(view.shape))
    if not one.takes_strides and not in_a_row:
        return (
            f"has strides {view.strides} at shape {view.shape}, and the kernel takes only "
            "contiguous tensors (unless it has takes_strides=True)"
        )
    return ""


def _what(launch: Launch, one: BinaryKernel) -> str:
    return f"{launch.place}: kernel {one.name} of {launch.name}"

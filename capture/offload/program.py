"""Programs: the recorded launches of a model over values, without addresses."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.structure import Structure

if TYPE_CHECKING:
    import torch


class Role(enum.StrEnum):
    """What a Value is to the caller."""

    INPUT = "input"
    OUTPUT = "output"
    WEIGHT = "weight"
    ACTIVATION = "activation"
    SCRATCH = "scratch"  # an operator's own memory, appended by a backend: no file has it


PLACED_ROLES = (Role.ACTIVATION, Role.SCRATCH)
"""The Values that nobody sees: they share the feature map."""


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A non-numeric operator attribute by name, such as `Symbol("dtype", "float32")`.

    `kind` is one of `dtype`, `device`, `layout`, `memory_format`, `generator`.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class TensorView:
    """A strided view of a Value: what an operator is given, or what a caller gets.

    Shapes: `shape` and `strides` count elements; `offset_bytes` counts from the Value's base.
    `conjugate` and `negative` are torch's lazy bits.
    """

    value: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    conjugate: bool = False
    negative: bool = False

    @property
    def end_bytes(self) -> int:
        """One past the last byte that the view reaches, counted from the Value's base."""
        return self.offset_bytes + span_bytes(self.shape, self.strides, self.dtype)

    def __str__(self) -> str:
        at = f"+{self.offset_bytes}" if self.offset_bytes else ""
        bits = "*" * self.conjugate + "-" * self.negative
        return f"{bits}%{self.value}{at}:{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A static-shape tensor of the program: a range of bytes that belong together, no address.

    Attributes:
        index: its position in `Program.values`.
        role: what it is to the caller.
        shape, strides, dtype: those of its first tensor (it may be viewed otherwise).
        size_bytes: the bytes that it spans.
        name: for people: a parameter's name, an argument's place, the operator that made it.
        host_content: of a host constant its bytes when it was recorded; None: it lies on the
            device. A host constant is a tensor on the CPU in a Program for another device, of no
            dimensions but where unseen code may read it. Launches take its value when they are
            captured, so it has no slot, and each execution must find the same bytes.
        device_format: the format of the device's own that its storage has (`FRACTAL_NZ`), so that
            its bytes are not as shape and strides say; empty: they are.
    """

    index: int
    role: Role
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    size_bytes: int
    name: str
    host_content: bytes | None = None
    device_format: str = ""

    @property
    def on_host(self) -> bool:
        """Whether it is a host constant."""
        return self.host_content is not None


Argument = TensorView | Symbol | None | bool | int | float | complex | str | tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One operator launch.

    Attributes:
        index: its position in `Program.launches`.
        operator: the qualified overload, such as `aten::add.Tensor` or `aten::mm`.
        arguments: in schema order, defaults filled in; tensor lists as tuples.
        results: for each tensor that the operator returns, in order, the view of the Value that
            it makes, or None where it returns an argument, a view of one, a tensor on the CPU
            that nobody uses and that is no host constant, or nothing.
        reads, writes: the Values that it was observed to read and to write.
        random: it draws from a generator, so it is never removed, even if nobody reads it.
        guard: of a host read, the value that was read, which each execution must find again.
        guards_shape: its results' shapes depend on data and must come out as recorded.
        source: the user's `file:line`.
    """

    index: int
    operator: str
    arguments: tuple[Argument, ...]
    results: tuple[TensorView | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool
    guard: bool | int | float | complex | None
    guards_shape: bool
    source: str

    def views(self) -> Iterator[TensorView]:
        """Every tensor argument, those in lists included."""
        for argument in self.arguments:
            if isinstance(argument, TensorView):
                yield argument
            elif isinstance(argument, tuple):
                yield from (item for item in argument if isinstance(item, TensorView))

    def made(self) -> Iterator[TensorView]:
        """The results that are new Values."""
        return (result for result in self.results if result is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A tensor of the model's result.

    Attributes:
        view: where it lies.
        input_leaf: the input whose own tensor object is returned, or -1.
    """

    view: TensorView
    input_leaf: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the content of a weight lies in a file; contiguous, in the machine's byte order.

    Attributes:
        name: in the file.
        path: of the file, absolute.
        offset_bytes: where in the file it begins.
        size_bytes: how many bytes it has.
        shape, dtype: of the tensor.
    """

    name: str
    path: str
    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Two inputs that shared memory while one of them was written: they must do so again.

    `distance_bytes` is the second input's address minus the first's.
    """

    first: int
    second: int
    distance_bytes: int


OPAQUE_OPERATOR = "offload::opaque"
"""The operator of the only launch of an opaque Program; torch has none of this name."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpaqueCall:
    """What the launch of an opaque Program is: the recorded callable itself, by reference.

    Attributes:
        call: takes the tensors of the Program's inputs in order and gives those of its results in
            order. It reads and writes weights where they are. Raises CaptureError where its
            result is nested otherwise than the recorded one.
        reason: why the call is one launch, for people.
    """

    call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """How a program was called when it was recorded; an execution that differs is refused.

    Attributes:
        state: autocast and the default dtype, as the native side packs them.
        root: gives the module that was called while it lives; None for a function.
        training: whether the module was in training mode.
    """

    state: int
    root: Callable[[], torch.nn.Module | None] | None
    training: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """Launches over Values in recorded order, for the device type that they were recorded on.

    Attributes:
        device: the device type, such as `cpu`.
        device_index: which of the accelerators of that type; None on the CPU, and where the
            Program is on none of those that are here.
        inputs: for each input tensor, in the order of `arguments_structure`, its whole view.
        results: the tensors of the result, in the order of `result_structure`.
        overlaps: which inputs must overlap as they did, because one of them is written.
        weights: for each Value of role weight the tensors that hold it (several when parameters
            share a storage); by reference, never a copy.
        weight_views: how each of those tensors viewed the Value when it was recorded.
        stored: for each Value of role weight that no tensor holds, the file that does.
        generators: the generators that random launches draw from, the default one first.
        parameter_names: names of the callable's positional parameters, to accept keywords; empty
            for those that can be given by position only.
        keyword_only_names: names of its other parameters. A keyword that is neither went into
            the callable's own **kwargs.
        host_reads: where the model would have read a tensor on the host: notes for people.
        versions: of the libraries that recorded it.
        opaque: of a Program whose launches could not be seen: it has one launch, which calls the
            recorded callable. Its arguments are the input views; its results are, for each tensor
            of the Program's results, the view of the Value that it makes there. None for others.
        unchecked: why it is not known whether the launches do all that the callable does; empty if
            it was checked. For people.
        input_samples: for each input what its first bytes were when it was recorded (empty where
            that is not known), for executions that nobody asks for; empty in a program from a
            file. It says nothing of what the Program does, and is not compared.
        caller: how it was called; None in a program from a file, which computes what was recorded
            wherever it is called.
    """

    device: str
    values: tuple[Value, ...]
    launches: tuple[Launch, ...]
    inputs: tuple[TensorView, ...]
    results: tuple[Result, ...]
    arguments_structure: Structure
    result_structure: Structure
    overlaps: tuple[Overlap, ...] = ()
    weights: Mapping[int, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    weight_views: Mapping[int, tuple[TensorView, ...]] = dataclasses.field(default_factory=dict)
    stored: Mapping[int, StoredTensor] = dataclasses.field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    parameter_names: tuple[str, ...] = ()
    keyword_only_names: tuple[str, ...] = ()
    host_reads: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device_index: int | None = None
    opaque: OpaqueCall | None = None
    unchecked: str = ""
    input_samples: tuple[bytes, ...] = dataclasses.field(default=(), compare=False, repr=False)
    caller: Caller | None = dataclasses.field(default=None, compare=False, repr=False)

    def of_role(self, role: Role) -> tuple[Value, ...]:
        """The Values of one role, in order."""
        return tuple(value for value in self.values if value.role is role)

    def __str__(self) -> str:
        lines = [
            f"program on {self.device}: {len(self.launches)} launches, {len(self.values)} values"
        ]
        lines += [
            f"  {value.role:<10} %{value.index} {value.dtype}{list(value.shape)} "
            f"{value.size_bytes} B  {value.name}{'  constant on the CPU' * value.on_host}"
            f"{f'  in {value.device_format}' if value.device_format else ''}"
            for value in self.values
            if value.role not in PLACED_ROLES
        ]
        lines += [f"  {_launch_line(launch)}" for launch in self.launches]
        returned = ", ".join(str(result.view) for result in self.results)
        return "\n".join([*lines, f"  return {returned}"])


def _launch_line(launch: Launch) -> str:
    made = ", ".join(str(view) for view in launch.made())
    written = set(launch.writes) - {view.value for view in launch.made()}
    left = made or ", ".join(f"write %{index}" for index in sorted(written)) or "-"
    arguments = ", ".join(_argument_text(argument) for argument in launch.arguments)
    guard = f"  guard {launch.guard!r}" if launch.guard is not None else ""
    return f"{launch.index:>4}: {left} = {launch.operator}({arguments}){guard}  # {launch.source}"


def _argument_text(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(_argument_text(item) for item in argument) + "]"
    return str(argument)


ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


def span_bytes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
    """Bytes from the first element of a strided tensor to one past its last."""
    if math.prod(shape) == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * ITEM_BYTES[dtype]


def same_strides(shape: tuple[int, ...], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides are the same but for those that are never used.

    Those of dimensions of one element, and of a tensor without any. Kernels and torch's fake
    tensors set these differently.
    """
    used = [size > 1 for size in shape]
    return 0 in shape or all(
        not is_used or here == there for is_used, here, there in zip(used, one, other, strict=True)
    )


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a strided tensor fills its span, each element at a place of its own."""
    reached = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != reached:
            return False
        reached *= max(size, 1)
    return True

"""Values: the tensors of a Program as ranges of bytes, and strided views of them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence


class Role(enum.StrEnum):
    """What a Value is to the caller."""

    INPUT = "input"
    OUTPUT = "output"
    WEIGHT = "weight"
    ACTIVATION = "activation"
    SCRATCH = "scratch"  # an operator's own memory, appended by a backend: no file has it
    DERIVED = "derived"  # made of weights alone, lasts while these are not written: no file has it


PLACED_ROLES = (Role.ACTIVATION, Role.SCRATCH)
"""The Values that nobody sees: they share the feature map."""

MADE_ROLES = (Role.ACTIVATION, Role.OUTPUT)
"""The Values that launches make, whether callers see them or not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """An object by name, such as `Symbol("dtype", "float32")`.

    `kind` is one of `dtype`, `device`, `layout`, `memory_format`, `generator` (by its number in
    `Bindings.generators`), or in the nesting of arguments and results `object`: any other, by its
    class.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class TensorView:
    """A strided view of a Value: what an operator is given, or what a caller gets.

    Shapes: `shape` and `strides` count elements; `offset_bytes` counts from the Value's base.
    `conjugate` and `negative` are torch's lazy bits. `requires_grad`: a composite operator is given
    it, which computes otherwise where gradients may be asked for (`should_fold` in
    aten/src/ATen/native/LinearAlgebra.cpp); executions record none.
    """

    value: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    conjugate: bool = False
    negative: bool = False
    requires_grad: bool = False

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
    return used_strides(shape, tuple(one)) == used_strides(shape, tuple(other))


def used_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with 0 in the place of those that are never used, as in `same_strides`."""
    if 0 in shape:
        return (0,) * len(shape)
    return tuple(step if size > 1 else 0 for size, step in zip(shape, strides, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in the order of their indices."""
    return tuple(math.prod(size or 1 for size in shape[at + 1 :]) for at in range(len(shape)))


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a strided tensor fills its span, each element at a place of its own."""
    reached = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != reached:
            return False
        reached *= max(size, 1)
    return True

"""Kernels that a model launches through Triton, as data: source, configuration and arguments."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload.errors import ProgramError
from offload.program.device_kernels import DeviceCall, DeviceKernel, Number, Parameter, Pointer
from offload.program.values import Symbol, TensorView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offload.program.launch import Launch

Constant = None | bool | int | float | str | Symbol | tuple[Any, ...]
"""The value of a parameter that is compiled in; a Symbol of the kind dtype for a type of Triton."""

NAMESPACE = "triton"
CONSTANT = "constexpr"
"""The type of a parameter that is compiled in, in a signature of Triton."""

POINTER_BYTES = 8
SCALAR_BYTES: Mapping[str, int] = {
    "u1": 1, "i1": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip
"""Sizes of numbers as arguments, by their type in a signature.

As Triton 3.7 passes them: `extraction_infos` in triton/backends/nvidia/driver.c.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TritonKernel:
    """A callee that is a kernel written in Triton, which the model itself launches.

    Its launch takes the parameters that are not compiled in, in order: a view for an address, else
    a number. It makes nothing; `Launch.writes` says which Values it writes. Kernels with the
    constants 1, 1.0 and True differ, as Triton compiles different code for them.

    Attributes:
        function: the name of the kernel in `source`.
        source: a Python module that defines it and all that it uses.
        signature: the name and type of each parameter, as Triton writes types: `*fp32`, `i32`, or
            `constexpr` for one that is compiled in.
        constants: those that are compiled in.
        divisible: the parameters that are multiples of 16, for which Triton compiles other code.
            Of addresses: those whose view begins at a multiple of 16 bytes of its Value.
        options: of the compiler, as given at the launch or chosen by Triton's autotuner:
            `num_warps`, `num_stages` and the like. The compiler has defaults for the others.
        grid: blocks in x, y and z.
    """

    function: str
    source: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Constant], ...]
    grid: tuple[int, int, int]

    def __eq__(self, other: object) -> bool:
        """Whether both are one kernel in one configuration."""
        return isinstance(other, TritonKernel) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """A hash that fits `__eq__`."""
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        typed = repr((self.constants, self.options))  # in Python, 1 == 1.0 == True
        return self.function, self.source, self.signature, typed, self.divisible, self.grid

    @property
    def name(self) -> str:
        """A name in place of an operator's; torch has no such operator."""
        return f"{NAMESPACE}::{self.function}"

    @property
    def configuration(self) -> str:
        """Its grid, constants and options, for messages."""
        given = [*self.constants, *self.options]
        text = ", ".join(f"{name}={value}" for name, value in given)
        grid = ", ".join(map(str, self.grid))
        return f"[{grid}] {text}".rstrip()

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """The name and type of each parameter that is an argument of the launch."""
        return tuple(one for one in self.signature if one[1] != CONSTANT)

    def check(self, arguments: Sequence[object]) -> None:
        """Check that it is consistent in itself, and takes these arguments.

        Raises:
            ProgramError: it is not, or does not.
        """
        names = [name for name, _ in self.signature]
        constants = [name for name, kind in self.signature if kind == CONSTANT]
        parameters = self.parameters()
        if len(set(names)) != len(names) or [name for name, _ in self.constants] != constants:
            raise ProgramError(f"{self.name}: its constants are not those of its signature")
        if not set(self.divisible) <= {name for name, _ in parameters}:
            raise ProgramError(f"{self.name}: multiples of 16 that are not among its parameters")
        if len(self.grid) != 3 or not all(1 <= one < 2**31 for one in self.grid):
            raise ProgramError(f"{self.name}: expected a grid of positive sizes, got {self.grid}")
        if len(arguments) != len(parameters):
            raise ProgramError(
                f"{self.name} takes {len(parameters)} arguments, {len(arguments)} are given"
            )
        for (name, kind), argument in zip(parameters, arguments, strict=True):
            fits = (
                isinstance(argument, TensorView)
                and (name not in self.divisible or argument.offset_bytes % 16 == 0)
                if kind.startswith("*")
                else _is_number(argument, kind)
            )
            if not fits:
                raise ProgramError(f"{self.name} takes {kind} as {name}, {argument} is given")

    def call(self, launch: Launch, compiled: DeviceKernel) -> DeviceCall:
        """A launch of it by a device's driver.

        Args:
            launch: whose callee it is. Words of addresses count its views.
            compiled: its code.
        """
        found: list[Parameter] = []
        n_views = 0
        for (_, kind), argument in zip(self.parameters(), launch.arguments, strict=True):
            if isinstance(argument, TensorView):
                found.append(Pointer(n_views))
                n_views += 1
            else:
                assert isinstance(argument, (bool, int, float))
                found.append(Number(bits_of(argument, kind), SCALAR_BYTES[kind]))
        return DeviceCall(compiled, self.grid, tuple(found))


@dataclasses.dataclass(frozen=True, slots=True)
class TritonCode:
    """How this process can launch a `TritonKernel`.

    Attributes:
        compiled: for one kind of device; None: it is not compiled yet.
        launch: by Triton itself, with the arguments of a launch, on the device's current stream;
            None in a Program from a file.
    """

    compiled: DeviceKernel | None = None
    launch: Callable[[Sequence[Any]], None] | None = None


def _is_number(argument: object, kind: str) -> bool:
    """Whether an argument can be passed as a number of this type."""
    if kind not in SCALAR_BYTES or not isinstance(argument, (bool, int, float)):
        return False
    if type(argument) is float and not kind.startswith(("fp", "bf")):
        return False
    try:
        bits_of(argument, kind)
    except (OverflowError, struct.error):
        return False
    return True


def bits_of(number: bool | int | float, kind: str) -> int:
    """The bytes of a number as an argument, as an integer.

    As Triton converts them: `extractFP16` and the like in triton/backends/nvidia/driver.c. A number
    beyond float32 becomes infinity, and bfloat16 is the upper half of float32.

    Raises:
        OverflowError: a number beyond float16.
        struct.error: an integer beyond float64.
    """
    if kind == "fp64":
        return int.from_bytes(struct.pack("<d", number), "little")
    if kind == "fp16":
        return int.from_bytes(struct.pack("<e", number), "little")
    if kind in ("fp32", "bf16"):
        try:
            packed = struct.pack("<f", number)
        except OverflowError:
            packed = struct.pack("<f", float("inf") if number > 0 else float("-inf"))
        bits = int.from_bytes(packed, "little")
        return bits if kind == "fp32" else bits >> 16
    return int(number) % (1 << (8 * SCALAR_BYTES[kind]))

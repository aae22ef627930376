"""Bindings: the live objects that a Program stands for, and both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.program.program import Program
from offload.program.structure import Structure

if TYPE_CHECKING:
    import torch

OpaqueCall = Callable[["Sequence[torch.Tensor]"], "Sequence[torch.Tensor]"]

# What is watched between executions: dictionaries and lists; attributes as a dictionary and a key
# in it; leaves, each with the gradient that it is to have and whether that is added to; and whether
# this is all that there is to look at.
Watched = tuple[
    "Sequence[dict[Any, Any] | list[Any]]",
    "Sequence[tuple[dict[str, Any], str]]",
    "Sequence[tuple[torch.Tensor, torch.Tensor | None, bool]]",
    bool,
]


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
class KernelFunction:
    """A compiled function `void(void* const* words)`: the addresses of its launch's Values.

    Attributes:
        address: of its code, which stays loaded while the process lives.
        prove: of these addresses, whether the function may be used: called at the first execution,
            before the launch, on its live Values; changes none of their bytes.
    """

    address: int
    prove: Callable[[Sequence[int]], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Bindings:
    """What one Program stands for in this process; by reference, never a copy.

    Attributes:
        weights: for each Value of role weight the tensors that hold it, as `Program.weight_views`
            has their views.
        stored: for each Value of role weight that no tensor holds, the file that does.
        generators: those that random launches draw from, the default one first; launches name
            them by number.
        callables: of opaque callees, by `Opaque.index`. Each takes the tensors of the Program's
            inputs in order and gives those of its results in order, and raises CaptureError where
            its result is nested otherwise than the recorded one.
        kernels: of compiled callees, by `Kernel.index`.
        input_samples: for each input what its first bytes were when it was recorded (empty where
            that is not known), for executions that nobody asks for; none in a program from a
            file.
        arguments, results: the nesting of arguments and results as the Program has it, with the
            recorded classes and objects themselves; changeable ones as they were (`Content`). In a
            program from a file only the classes of results that were found. None: there are none.
        root: gives the module that was called while it lives; None for a function, and in a
            program from a file.
        before_execution: is called before an execution where something of what it last returned
            has changed since, and may raise BindingError: of a step that trains, what it compares
            and puts in order. None: there is nothing to do.
    """

    weights: Mapping[int, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    stored: Mapping[int, StoredTensor] = dataclasses.field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    callables: tuple[OpaqueCall, ...] = ()
    kernels: tuple[KernelFunction, ...] = ()
    input_samples: tuple[bytes, ...] = ()
    arguments: Structure | None = None
    results: Structure | None = None
    root: Callable[[], torch.nn.Module | None] | None = None
    before_execution: Callable[[], Watched] | None = None

    def moved(self, positions: Mapping[int, int]) -> Bindings:
        """The same objects for a Program that was rewritten.

        Args:
            positions: for each Value that is left its new index, as `Rewritten.positions`.
        """
        return dataclasses.replace(
            self,
            weights=_moved(self.weights, positions),
            stored=_moved(self.stored, positions),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BoundProgram:
    """A Program with its own Bindings, whose indices are those of just this Program."""

    program: Program
    bindings: Bindings = dataclasses.field(default_factory=Bindings)

    def unguarded(self) -> BoundProgram:
        """The same, with nothing to do before an execution."""
        return BoundProgram(self.program, dataclasses.replace(self.bindings, before_execution=None))

    @property
    def arguments_structure(self) -> Structure:
        """The nesting of arguments, to match calls with."""
        return self.bindings.arguments or self.program.arguments_structure

    @property
    def result_structure(self) -> Structure:
        """The nesting of the result, to build results by."""
        return self.bindings.results or self.program.result_structure


def _moved(held: Mapping[int, Any], positions: Mapping[int, int]) -> dict[int, Any]:
    return {positions[index]: one for index, one in held.items() if index in positions}

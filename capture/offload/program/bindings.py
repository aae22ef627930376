"""Bindings: the live objects of a Program, and the two together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.program.device_kernels import DeviceFunction
from offload.program.program import Program
from offload.program.structure import Structure
from offload.program.triton_kernels import TritonCode, TritonKernel

if TYPE_CHECKING:
    import torch

OpaqueCall = Callable[["Sequence[torch.Tensor]"], "Sequence[torch.Tensor]"]

# What is watched between executions: dictionaries and lists; attributes, each as a dictionary and a
# key in it; leaves, each with the gradient that it must have and whether that gradient is
# accumulated; and whether this is everything to compare.
Watched = tuple[
    "Sequence[dict[Any, Any] | list[Any]]",
    "Sequence[tuple[dict[str, Any], str]]",
    "Sequence[tuple[torch.Tensor, torch.Tensor | None, bool]]",
    bool,
]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the content of a weight lies in a file; contiguous, in native byte order.

    Attributes:
        name: of the tensor in the file.
        path: of the file, absolute.
        offset_bytes: where it begins in the file.
        size_bytes: its size.
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
        prove: whether the function may be used at these addresses. Called at the first execution,
            before the launch, on its live Values; changes no bytes of them.
    """

    address: int
    prove: Callable[[Sequence[int]], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Bindings:
    """The live objects of one Program in this process; by reference, never copied.

    Attributes:
        weights: for each Value of role weight the tensors that hold it, in the order of its
            `Program.weight_views`.
        stored: for each Value of role weight that no tensor holds, its place in a file.
        generators: those that random launches draw from, the default one first; launches name them
            by number.
        callables: of opaque callees, by `Opaque.index`. Each takes the tensors of the Program's
            inputs in order, returns those of its results in order, and raises CaptureError if its
            result is nested differently from the recorded one.
        kernels: of compiled callees, by `Kernel.index`: functions of the host, or a device's.
        triton: how each Triton kernel is launched; kernels without an entry are compiled at a load.
        input_samples: for each input its first bytes at the recording (empty if unknown), for
            executions that no caller requests. Empty in a Program from a file.
        arguments, results: the nesting of arguments and results as in the Program, with the
            recorded classes and objects; mutable ones as they were (`Content`). In a Program from a
            file only the classes of results that were found. None: there are none.
        root: returns the module that was called while it lives; None for a function, and in a
            Program from a file.
        before_execution: called before an execution if anything that it last returned has changed
            since; may raise BindingError. For a training step: compares its state and puts it in
            order. None: nothing to do.
    """

    weights: Mapping[int, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    stored: Mapping[int, StoredTensor] = dataclasses.field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    callables: tuple[OpaqueCall, ...] = ()
    kernels: tuple[KernelFunction | DeviceFunction, ...] = ()
    triton: Mapping[TritonKernel, TritonCode] = dataclasses.field(default_factory=dict)
    input_samples: tuple[bytes, ...] = ()
    arguments: Structure | None = None
    results: Structure | None = None
    root: Callable[[], torch.nn.Module | None] | None = None
    before_execution: Callable[[], Watched] | None = None

    def moved(self, positions: Mapping[int, int]) -> Bindings:
        """The same objects for a rewritten Program.

        Args:
            positions: for each Value that remains its new index, as `Rewritten.positions`.
        """
        return dataclasses.replace(
            self,
            weights=_moved(self.weights, positions),
            stored=_moved(self.stored, positions),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BoundProgram:
    """A Program with its own Bindings; their indices are those of this Program."""

    program: Program
    bindings: Bindings = dataclasses.field(default_factory=Bindings)

    def unguarded(self) -> BoundProgram:
        """Return the same without `before_execution`."""
        return BoundProgram(self.program, dataclasses.replace(self.bindings, before_execution=None))

    @property
    def arguments_structure(self) -> Structure:
        """The nesting of arguments that calls are matched with."""
        return self.bindings.arguments or self.program.arguments_structure

    @property
    def result_structure(self) -> Structure:
        """The nesting by which results are built."""
        return self.bindings.results or self.program.result_structure


def _moved(held: Mapping[int, Any], positions: Mapping[int, int]) -> dict[int, Any]:
    return {positions[index]: one for index, one in held.items() if index in positions}

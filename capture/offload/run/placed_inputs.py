"""Check the inputs of a call on several devices before any launch is queued."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from offload.errors import BindingError
from offload.interpreter.torch_names import dtype_name
from offload.native import _native
from offload.program import BoundProgram, Program, TensorView, same_strides, span_bytes

Base = tuple[torch.UntypedStorage, int]
"""Where a Value begins: a storage, and how many bytes into it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """The memory of a weight. Addresses in bytes."""

    name: str
    begin: int
    end: int


class InputChecks:
    """Checks the tensors of calls of one Program, as an Executable of the whole would.

    A segment knows only its own inputs: a later one would refuse after earlier ones have begun, and
    no segment sees that another writes one of its inputs.

    Owner: one executable. Thread: any.
    """

    def __init__(self, program: Program, weights: Mapping[int, Base]) -> None:
        """Note where the weights of a Program lie."""
        self._program = program
        written = program.written_values
        leaves = enumerate(program.inputs)
        self._written = {leaf for leaf, view in leaves if view.value in written}
        self._pairs = tuple(
            (first, second)
            for first, second in itertools.combinations(range(len(program.inputs)), 2)
            if not self._written.isdisjoint((first, second))
        )
        self._distances = {(one.first, one.second): one.distance_bytes for one in program.overlaps}
        ranges = {value: self._range(value, base) for value, base in weights.items()}
        self._weights = tuple(ranges.values()) if self._written else ()
        self._written_weights = tuple(ranges[value] for value in ranges if value in written)

    def check(self, tensors: Sequence[torch.Tensor], *, in_grad_mode: bool) -> None:
        """Refuse what no segment would detect, or a later one than the first.

        Args:
            tensors: of the call, in the order of the Program's inputs.
            in_grad_mode: whether the thread that calls or submits records gradients.

        Raises:
            BindingError: a tensor is not plain, has another layout than the recorded one, has lost
                its memory, requires gradients in grad mode, or shares written memory in another
                way.
        """
        for leaf, (view, tensor) in enumerate(zip(self._program.inputs, tensors, strict=True)):
            self._check_layout(view, tensor)
            _native.check_memory(self._name(leaf), tensor)
            if in_grad_mode:
                self._check_gradients(leaf, tensor)
        for first, second in self._pairs:
            self._check_pair(first, second, tensors)
        if not self._weights and not self._written_weights:
            return
        for leaf, tensor in enumerate(tensors):
            weights = self._weights if leaf in self._written else self._written_weights
            self._check_weights(leaf, tensor, weights)

    def _range(self, value: int, base: Base) -> _Range:
        one = self._program.values[value]
        begin = base[0].data_ptr() + base[1]
        return _Range(one.name, begin, begin + one.size_bytes)

    def _name(self, leaf: int) -> str:
        return self._program.values[self._program.inputs[leaf].value].name

    def _check_gradients(self, leaf: int, tensor: torch.Tensor) -> None:
        base = tensor._base
        if tensor.requires_grad:
            what = "it requires gradients, and an execution records none"
        elif leaf in self._written and base is not None and base.requires_grad:
            what = "it is written, and a view of a tensor that requires gradients"
        else:
            return
        raise BindingError(
            f"{self._name(leaf)}: {what}; call under torch.no_grad(), or pass its .detach()"
        )

    def _check_layout(self, view: TensorView, tensor: torch.Tensor) -> None:
        program, shape = self._program, tuple(tensor.shape)
        is_same = (
            shape == view.shape
            and dtype_name(tensor.dtype) == view.dtype
            and tensor.device.type == program.device
            and same_strides(shape, tensor.stride(), view.strides)
            and (tensor.is_conj(), tensor.is_neg()) == (view.conjugate, view.negative)
        )
        if not is_same:
            raise BindingError(
                f"{program.values[view.value].name}: expected {view.dtype}{list(view.shape)} with "
                f"strides {list(view.strides)} on {program.device}, got "
                f"{dtype_name(tensor.dtype)}{list(shape)} with strides {list(tensor.stride())} on "
                f"{tensor.device}"
            )

    def _check_pair(self, first: int, second: int, tensors: Sequence[torch.Tensor]) -> None:
        """Check that inputs of which one is written overlap exactly as recorded, or not at all."""
        names = f"{self._name(first)} and {self._name(second)}"
        one, other = tensors[first], tensors[second]
        distance = self._distances.get((first, second))
        if distance is None:
            if _overlap(_memory(one), _memory(other)):
                raise BindingError(
                    f"{names} overlap in memory and one of them is written: they were separate "
                    "when recorded, so pass separate tensors"
                )
        elif other.data_ptr() - one.data_ptr() != distance:
            raise BindingError(
                f"{names} shared memory when recorded, {distance} bytes apart, and one of them is "
                "written: they must do so again, with the same strides"
            )

    def _check_weights(self, leaf: int, tensor: torch.Tensor, weights: Sequence[_Range]) -> None:
        memory = _memory(tensor)
        for weight in weights:
            if _overlap(memory, (weight.begin, weight.end)):
                raise BindingError(
                    f"{self._name(leaf)} overlaps {weight.name} in memory and one of them is "
                    "written: pass a copy"
                )


def check_caller(bound: BoundProgram) -> None:
    """Refuse a call while torch is in another state than when the program was recorded.

    Executables of the recorded device check it themselves; those of other devices do not know it.

    Raises:
        BindingError: autocast, the default dtype or the model's mode differs.
    """
    caller = bound.program.caller
    if caller is None:
        return
    if _native.caller_state(bound.program.device) != caller.state:
        raise BindingError(
            "torch's autocast or default dtype is another than when the program was recorded, so "
            "that the model would compute other values: call as it was recorded, or capture again"
        )
    root = None if bound.bindings.root is None else bound.bindings.root()
    if root is not None and root.training != caller.training:
        modes = ("evaluation", "training")
        raise BindingError(
            f"the model was in {modes[caller.training]} mode when it was recorded, and is in "
            f"{modes[root.training]} mode now: call model.{'train' if caller.training else 'eval'}"
            "(), or capture it again"
        )


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of its first byte and behind its last byte."""
    begin = tensor.data_ptr()
    shape, strides = tuple(tensor.shape), tensor.stride()
    return begin, begin + span_bytes(shape, strides, dtype_name(tensor.dtype))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether they share a byte; empty ranges share no byte."""
    return max(one[0], other[0]) < min(one[1], other[1])

"""The arguments of a recorded call: taken apart before it, and compared after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.structure import OpaqueStructure, flatten, frozen, leaf_paths, unflatten
from offload.program.structure_match import StructureMismatch, match
from offload.record.operators import check_plain, is_tensor
from offload.record.storages import StorageTable

# Attributes that torch sets on an nn.Buffer. Names with a leading underscore are notes of
# libraries: torch marks what it compiled for, transformers what it initialised.
_BUFFER_ATTRIBUTES = frozenset({"persistent"})


class CallArguments:
    """The arguments that a caller gave.

    Owner: one Recorder.

    Attributes:
        tensors: the caller's tensors, in order.
        names: the place of each tensor, such as `args[1]`.
        structure: their nesting, with the content that mutable constants had.
        live: their nesting with the mutable constants themselves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take arguments apart.

        Raises:
            CaptureError: one of them cannot be recorded.
        """
        try:
            self.tensors, self.live = flatten((args, kwargs), is_tensor, share_same=False)
        except OpaqueStructure as error:
            raise CaptureError(f"an argument cannot be flattened into tensors: {error}") from error
        self.structure = frozen(self.live)
        paths = leaf_paths(self.live, "input")
        self.names = [_argument_name(paths[leaf]) for leaf in range(len(self.tensors))]
        for tensor, name in zip(self.tensors, self.names, strict=True):
            check_plain(tensor, name)
            _check_has_memory(tensor, name)
            _check_attributes(tensor, name)

    def nested(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The same arguments around other tensors."""
        args, kwargs = unflatten(self.live, list(tensors))
        return args, kwargs

    def check_unchanged(
        self, call: tuple[Any, Any], inputs: Sequence[torch.Tensor], table: StorageTable
    ) -> None:
        """Refuse changes to arguments made in Python: a replay would not repeat them.

        Args:
            call: the arguments that the call received, as `nested` made them.
            inputs: the tensors in these arguments.
            table: the state of the arguments when the call began.

        Raises:
            CaptureError: an argument was replaced, reshaped, or changed otherwise.
        """
        advice = (
            "return new tensors instead, or pass a cache of fixed size that is written in place"
        )
        try:
            tensors = [
                tensor
                for expected, given, where in zip(
                    self.structure.children, call, ("args", "kwargs"), strict=True
                )
                for tensor in match(expected, given, is_tensor, where)
            ]
        except StructureMismatch as error:
            raise CaptureError(f"the call changed its arguments: {error}; {advice}") from None
        for name, tensor, given in zip(self.names, tensors, inputs, strict=True):
            tracked = table.find(given)
            same = tracked is not None and (
                tensor is given
                and tuple(given.shape) == tracked.value.shape
                and given.stride() == tracked.value.strides
            )
            if not same:
                raise CaptureError(
                    f"the call replaced {name}, or changed its storage or shape in place "
                    f"(resize_, set_, transpose_ and the like): {advice}"
                )


def _check_attributes(tensor: torch.Tensor, name: str) -> None:
    attributes = sorted(
        one for one in vars(tensor) if one not in _BUFFER_ATTRIBUTES and not one.startswith("_")
    )
    if attributes:
        raise CaptureError(
            f"{name} carries the attributes {attributes}, which the next tensor passed there may "
            "not have: pass what they hold as separate arguments, and the tensor's .detach()"
        )


def _argument_name(path: str) -> str:
    """`input[0][1]` becomes `args[1]`, and `input[1]['mask']` becomes `kwargs['mask']`."""
    kind = "args" if path.startswith("input[0]") else "kwargs"
    return kind + path[len("input[0]") :]


def _check_has_memory(tensor: torch.Tensor, name: str) -> None:
    if not tensor.numel() or tensor.device.type == "meta":
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise CaptureError(
            f"{name} has {tensor.numel()} elements, expected memory that holds them, got a "
            f"storage of {found} bytes, where {needed} are needed: it was freed or shrunk "
            "(untyped_storage().resize_()); restore it before the capture"
        )

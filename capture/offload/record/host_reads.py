"""Which torch functions read a tensor on the host without the dispatcher seeing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Functions that hand the memory itself to code that the recorder cannot follow.
REFUSED: Mapping[str, str] = {
    "data_ptr": "the address was taken, and what is done through it cannot be recorded",
    "__dlpack__": "the memory was handed out, and what is done with it cannot be recorded",
    "__cuda_array_interface__": "the memory was handed out, which cannot be recorded",
    "__repr__": "a tensor was printed: a replay prints nothing, so remove it from the forward",
}

_READ_SELF = frozenset({"tolist", "numpy", "__array__", "cpu_numpy"})
_BUILD_FROM_DATA = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})


def tensors_read(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors whose values the function `name` takes to the host."""
    if name in _READ_SELF:
        yield args[0]
    elif name in _BUILD_FROM_DATA:
        position = 1 if name == "new_tensor" else 0
        data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, (list, tuple)):
            yield from _nested_tensors(data)
    elif name == "tensor_split":
        indices = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
        if isinstance(indices, torch.Tensor):
            yield indices


def _nested_tensors(data: Any) -> Iterator[torch.Tensor]:
    for item in data:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _nested_tensors(item)


def without_write_access(name: str, outcome: Any) -> Any:
    """Make an array on a tensor's memory read-only: writes through it could not be seen."""
    if name in ("numpy", "__array__") and hasattr(outcome, "flags"):
        outcome.flags.writeable = False
    return outcome

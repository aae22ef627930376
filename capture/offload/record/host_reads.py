"""The torch functions that read a tensor on the host unseen by the dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MEMORY = "its memory was exposed, and what is done through it cannot be recorded"
_PRINTED = "a tensor was printed, which a replay would not do: take it out of the forward"

_ELEMENTWISE = "it calls a Python function on each element, which a replay would not do again"

# Functions that hand the memory or its content to code that the recorder cannot follow.
REFUSED: Mapping[str, str] = {
    "data_ptr": _MEMORY,
    "__dlpack__": _MEMORY,
    "__cuda_array_interface__": _MEMORY,
    "untyped_storage": _MEMORY,
    "storage": _MEMORY,
    "_typed_storage": _MEMORY,
    "__reduce_ex__": _MEMORY,
    "__repr__": _PRINTED,
    "__format__": _PRINTED,
    "apply_": _ELEMENTWISE,
    "map_": _ELEMENTWISE,
    "map2_": _ELEMENTWISE,
}

# Functions that give an address to a caller on the tensor's device, such as a kernel's launcher.
ADDRESSES = frozenset({"data_ptr", "__cuda_array_interface__"})

_READ_SELF = frozenset({"tolist", "numpy", "__array__"})

# Functions that make a tensor from Python data, and the position of the data.
_DATA_POSITION: Mapping[str, int] = {
    "tensor": 0,
    "as_tensor": 0,
    "asarray": 0,
    "new_tensor": 1,
    "new": 1,
    "__setitem__": 2,
    "__getitem__": 1,
}

# Recurrent layers on packed sequences read the batch sizes, their second argument.
_PACKED = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def tensors_read(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors whose values the torch function `name` reads on the host."""
    if name in _READ_SELF:
        yield args[0]
    elif name in _DATA_POSITION:
        position = _DATA_POSITION[name]
        data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
        if _is_sequence(data):
            yield from _nested_tensors(data, is_index=name == "__getitem__")
    elif name == "tensor_split":
        yield from _tensors(_argument(args, kwargs, 1, "tensor_indices_or_sections"))
    elif name == "tensordot":
        yield from _tensors(_argument(args, kwargs, 2, "dims"))
    elif name == "_pad_packed_sequence" or (name in _PACKED and _is_packed(args, kwargs)):
        yield _argument(args, kwargs, 1, "batch_sizes")


def _is_packed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether batch sizes precede the hidden state, so that the parameters come fourth."""
    if len(args) > 3:
        return isinstance(args[3], (list, tuple))
    following = ("data", "batch_sizes", "hx", "params")[len(args)]
    return "batch_sizes" in kwargs or (len(args) > 1 and following in kwargs)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif _is_sequence(argument):
        yield from _nested_tensors(argument, is_index=False)


def _is_sequence(thing: Any) -> bool:
    """Whether torch treats it as a sequence of numbers: anything with a length and items."""
    if isinstance(thing, (list, tuple)):
        return True
    other = (torch.Tensor, str, bytes, bytearray, memoryview, range, dict)
    methods = ("__len__", "__getitem__")
    return not isinstance(thing, other) and (
        all(hasattr(type(thing), name) for name in methods) and not hasattr(thing, "__array__")
    )


def _nested_tensors(data: Any, *, is_index: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors inside lists. Those directly in an index are used as tensors, not read."""
    for item in itertools.islice(iter(data), len(data)):
        if isinstance(item, torch.Tensor):
            if not is_index:
                yield item
        elif _is_sequence(item):
            yield from _nested_tensors(item, is_index=False)


def without_write_access(name: str, outcome: Any) -> Any:
    """Make an array on a tensor's memory read-only, as writes through it could not be seen."""
    if name in ("numpy", "__array__") and hasattr(outcome, "flags"):
        outcome.flags.writeable = False
    return outcome

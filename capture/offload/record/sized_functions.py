"""Functions of torch through which a call with varying sizes reaches its operators.

Some ask sizes for Python numbers: to make a tensor of numbers (`torch.tensor`, `y[0] = n`), or
because the operator's schema takes no symbolic integer (`torch.linspace`). In all recordings of
such a call they are recorded in another way, so that the launches are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._dispatch.python import enable_python_dispatcher

from offload.record.whole_layers import WholeLayers

# Numbers in longer lists are not treated as sizes, as each number is a launch.
_MOST_ITEMS = 64
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
_FRACTIONS = (float, torch.SymFloat)
_BOOLEANS = (bool, torch.SymBool)

# Up to here every integer is exact as a double, by which torch.tensor converts it to a fraction.
_MOST_EXACT = 2**53


class Recorder(Protocol):
    """The recorder of launches.

    Attributes:
        device: the device of the recording.
    """

    @property
    def device(self) -> torch.device:
        """The device of the recording."""

    def launch_directly(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = ...
    ) -> Any:
        """Record an operator without calling the torch function that would call it."""


class SizedFunctions:
    """Replacements of torch functions while a call with varying sizes is recorded.

    Owner: one Recorder.

    Attributes:
        layers: decides which recurrent layers are recorded as one launch.
    """

    def __init__(self, layers: WholeLayers) -> None:
        self.layers = layers

    def call(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorder: Recorder,
    ) -> Any:
        """Return the outcome of a function; NotImplemented: call the function itself.

        Args:
            func: the function.
            name: its name.
            args: its arguments.
            kwargs: likewise.
            recorder: records the launches.
        """
        if func in _OF_DATA or name == "new_tensor":
            return _tensor_of_numbers(name, args, kwargs, recorder.device)
        if name == "__setitem__" and len(args) == 3 and not kwargs:
            return _with_number_as_tensor(func, args, recorder.device)
        if func in _FACTORIES:
            return _FACTORIES[func](args, kwargs, recorder)
        if _MATMUL_ASKS and name in _MULTIPLYING and _has_symbols(args, kwargs):
            with enable_python_dispatcher():
                return func(*args, **kwargs)
        return self.layers.call(name, args, kwargs, recorder.launch_directly)


def _has_symbols(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a size of a tensor is a symbol of a recording."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
    return any(isinstance(size, torch.SymInt) for one in tensors for size in one.shape)


def _tensor_of_numbers(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """As torch.tensor of numbers, with a launch for each number."""
    like, data = args if name == "new_tensor" and len(args) == 2 else (None, *args[:1], None)[:2]
    options = dict(kwargs)
    dtype = options.pop("dtype", None) or getattr(like, "dtype", None)
    place = options.pop("device", None) or getattr(like, "device", torch.get_default_device())
    if len(args) != (1 if like is None else 2) or any(options.values()):
        return NotImplemented
    shape, numbers = _flattened(data)
    if not numbers or torch.device(place).type != device.type:
        return NotImplemented
    if all(isinstance(one, _BOOLEANS) for one in numbers) or not _can_fill(dtype):
        return NotImplemented
    numbers = [bool(one) if isinstance(one, torch.SymBool) else one for one in numbers]
    if dtype is None:
        is_fraction = any(isinstance(one, _FRACTIONS) for one in numbers)
        dtype = torch.get_default_dtype() if is_fraction else torch.int64
    if dtype.is_floating_point and not all(map(_is_exact, numbers)):
        return NotImplemented
    made = [torch.full((), one, dtype=dtype, device=place) for one in numbers]
    return torch.stack(made).reshape(shape) if shape else made[0]


def _can_fill(dtype: torch.dtype | None) -> bool:
    """Whether torch.full makes tensors of a dtype as torch.tensor does; not for float8."""
    return dtype is None or not dtype.is_floating_point or dtype.itemsize > 1


def _is_exact(number: Any) -> bool:
    return isinstance(number, _FRACTIONS) or bool(-_MOST_EXACT < number < _MOST_EXACT)


def _flattened(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists of numbers, and the numbers; empty for other data."""
    if type(data) in _NUMBERS:
        return (), [data]
    nothing: tuple[tuple[int, ...], list[Any]] = ((), [])
    if type(data) not in (list, tuple, torch.Size) or not 0 < len(data) <= _MOST_ITEMS:
        return nothing
    parts = [_flattened(one) for one in data]
    numbers = [number for _, part in parts for number in part]
    is_regular = all(shape == parts[0][0] and part for shape, part in parts)
    if not is_regular or len(numbers) > _MOST_ITEMS:
        return nothing
    return (len(data), *parts[0][0]), numbers


def _with_number_as_tensor(
    func: Callable[..., Any], args: tuple[Any, ...], device: torch.device
) -> Any:
    """As `tensor[index] = number`, where C++ makes a tensor of the number as well."""
    tensor, index, number = args
    is_plain = isinstance(tensor, torch.Tensor) and not tensor.is_complex()
    if type(number) not in _NUMBERS or not is_plain or tensor.device.type != device.type:
        return NotImplemented
    if not _can_fill(tensor.dtype):
        return NotImplemented
    number = bool(number) if isinstance(number, torch.SymBool) else number
    func(tensor, index, torch.full((), number, dtype=tensor.dtype, device=tensor.device))
    return None


def _spaced(operator: Any) -> Callable[..., Any]:
    """As torch.linspace and torch.logspace of numbers."""

    def spaced(args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> Any:
        names = ("start", "end", "steps", "base")[: 4 if "logspace" in str(operator) else 3]
        given, options = _given(names, args, kwargs)
        numbers = [given[name] for name in names if name in given]
        if options is None or len(numbers) < 3 or any(type(one) not in _NUMBERS for one in numbers):
            return NotImplemented
        return recorder.launch_directly(operator, tuple(numbers), options)

    return spaced


def _triangle(operator: Any) -> Callable[..., Any]:
    """As torch.tril_indices and torch.triu_indices."""

    def indices(args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> Any:
        given, options = _given(("row", "col", "offset"), args, kwargs)
        if options is None or not {"row", "col"} <= given.keys():
            return NotImplemented
        numbers = given["row"], given["col"], given.get("offset", 0)
        if kwargs.get("dtype") is None:
            options["dtype"] = torch.int64
        return recorder.launch_directly(operator, numbers, options)

    return indices


def _given(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Arguments by name, with dtype and device, which are None if there are other arguments."""
    given = dict(zip(names, args, strict=False))
    rest = {name: one for name, one in kwargs.items() if one is not None and one is not False}
    given |= {name: rest.pop(name) for name in names if name in rest}
    dtype = rest.pop("dtype", torch.get_default_dtype())
    device = torch.device(rest.pop("device", torch.get_default_device()))
    is_known = len(args) <= len(names) and not rest
    return given, {"dtype": dtype, "device": device} if is_known else None


def _one_hot(args: tuple[Any, ...], kwargs: dict[str, Any], _: Recorder) -> Any:
    """As one_hot of aten/src/ATen/native/Onehot.cpp, which first reads whether all classes fit.

    If a class does not fit, scattering raises an error as well.
    """
    given: dict[str, Any] = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
    classes, n_classes = given.get("input"), given.get("num_classes")
    if not isinstance(classes, torch.Tensor) or classes.dtype != torch.int64:
        return NotImplemented
    if not isinstance(n_classes, (int, torch.SymInt)) or n_classes <= 0:
        return NotImplemented
    zeros = torch.zeros((*classes.shape, n_classes), dtype=torch.int64, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


# Before torch 2.13 at::matmul asks sizes for numbers (aten/src/ATen/native/LinearAlgebra.cpp). Then
# torch's decomposition of it, which does not ask, stands for it where sizes are symbols; a capture
# refuses shapes for which the two launch other operators.
_MATMUL_ASKS = torch.__version__ < "2.13"
_MULTIPLYING = frozenset(
    {"matmul", "__matmul__", "__rmatmul__", "linalg_matmul", "linear"}
    | {"scaled_dot_product_attention", "multi_head_attention_forward"}
)
_OF_DATA = frozenset({torch.tensor, torch.as_tensor})
_FACTORIES: Mapping[Any, Callable[..., Any]] = {
    torch.nn.functional.one_hot: _one_hot,
    torch.linspace: _spaced(torch.ops.aten.linspace.default),
    torch.logspace: _spaced(torch.ops.aten.logspace.default),
    torch.tril_indices: _triangle(torch.ops.aten.tril_indices.default),
    torch.triu_indices: _triangle(torch.ops.aten.triu_indices.default),
}


# ---- what the operators give under fake tensors -------------------------------------------------


def _spaced_rule(start: Any, end: Any, steps: Any, *_: Any, **options: Any) -> torch.Tensor:
    torch._check(steps >= 0)
    return torch.empty((steps,), **options)


def _lower_rule(row: Any, col: Any, offset: Any, **options: Any) -> torch.Tensor:
    return torch.empty((2, _n_lower(row, col, offset)), **options)


def _upper_rule(row: Any, col: Any, offset: Any, **options: Any) -> torch.Tensor:
    return torch.empty((2, row * col - _n_lower(row, col, offset - 1)), **options)


def _n_lower(rows: Any, columns: Any, offset: Any) -> Any:
    """The number of elements of a matrix on or below a diagonal.

    Row `i` has `i + offset + 1` of them, at least 0 and at most `columns`.
    """

    def n_to(row: Any) -> Any:  # of the rows before this one, with unlimited columns
        n_rows = torch.sym_max(row, 0)
        return n_rows * (n_rows + 1) // 2

    return (
        n_to(rows + offset) - n_to(offset) - n_to(rows + offset - columns) + n_to(offset - columns)
    )


RULES: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.linspace.default: _spaced_rule,
    torch.ops.aten.logspace.default: _spaced_rule,
    torch.ops.aten.tril_indices.default: _lower_rule,
    torch.ops.aten.triu_indices.default: _upper_rule,
}

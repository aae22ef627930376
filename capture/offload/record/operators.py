"""What a dispatched operator is: its name, arguments in schema order, tensors."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program import Argument, Symbol
from offload.torch_names import dtype_name

# Operators that only reserve memory: their Value starts without content and no launch is kept.
_RESERVE_OPERATORS = frozenset(
    {
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)

_SKIPPED_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def is_tensor(thing: Any) -> bool:
    """Whether a leaf of a Structure."""
    return isinstance(thing, torch.Tensor)


_traced_location = contextvars.ContextVar("traced_location", default="")


@contextlib.contextmanager
def located_at(location: str) -> Iterator[None]:
    """Let `user_location` answer this, if not empty: a traced graph runs, not the user's code."""
    token = _traced_location.set(location)
    try:
        yield
    finally:
        _traced_location.reset(token)


def is_user_file(filename: str) -> bool:
    """Whether code of this file is neither torch's nor offload's, nor generated."""
    return not filename.startswith((*_SKIPPED_FOLDERS, "<"))


def user_location() -> str:
    """`file:line` of the innermost frame outside torch and offload."""
    if traced := _traced_location.get():
        return traced
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def flat(outcome: Any) -> list[Any]:
    """What an operator takes or returns, lists opened."""
    if isinstance(outcome, (list, tuple)):
        return [leaf for item in outcome for leaf in flat(item)]
    return [outcome]


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """The tensors of an argument, those in lists included."""
    return [item for item in flat(argument) if isinstance(item, torch.Tensor)]


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What torch says of an operator overload, read once: its schema is slow to read.

    Attributes:
        name: `aten::add.Tensor`; the default overload has no suffix.
        parameters: names and defaults, in schema order.
        declares_write: for each parameter, whether the schema says that it is written.
        returns: it returns something.
        reserves: it makes memory without content.
        random: it draws from a generator.
        reads_host: it may return a number that depends on a tensor's content.
        moves_metadata: it changes where or how its argument lies (`resize_`, `set_`, `t_`).
        dynamic_shape: torch says that its results' shapes may depend on content.
        is_aten: it is torch's own.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...]
    declares_write: tuple[bool, ...]
    returns: bool
    reserves: bool
    random: bool
    reads_host: bool
    moves_metadata: bool
    dynamic_shape: bool
    is_aten: bool

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in schema order, defaults filled in."""
        rest = self.parameters[len(args) :]
        return [*args, *(kwargs.get(name, default) for name, default in rest)]


@functools.cache
def operator_of(func: Any) -> Operator:
    """The Operator of an `OpOverload`."""
    schema = func._schema
    overload = "" if func._overloadname == "default" else func._overloadname
    name = f"{schema.name}.{overload}" if overload else schema.name
    writes = (one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return Operator(
        name,
        tuple((one.name, one.default_value) for one in schema.arguments),
        tuple(writes),
        returns=bool(schema.returns),
        reserves=name in _RESERVE_OPERATORS,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reads_host=torch.Tag.data_dependent_output in func.tags,
        moves_metadata=torch.Tag.inplace_view in func.tags,
        dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        is_aten=func.namespace == "aten",
    )


def check_plain(tensor: torch.Tensor, where: str) -> None:
    """Refuse tensors that are not a strided view of plain memory.

    Raises:
        CaptureError: a subclass with behaviour of its own, or a sparse, nested, quantised or
            zero-tensor layout.
    """
    plain = (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()
    )
    if plain:
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"{user_location()}: {where} uses a parameter that has no shape yet: call the model "
            "once before capturing it"
        )
    if not isinstance(tensor, torch.nn.Parameter):
        raise CaptureError(
            f"{user_location()}: {where} uses a {type(tensor).__qualname__} of layout "
            f"{tensor.layout}: only plain strided tensors can be recorded"
        )


def shape_depends_on_data(operator: Operator, arguments: list[Any]) -> bool:
    """Whether an operator's results may have other shapes for other values of its arguments.

    torch's tag says so of every overload that might; some are static for these arguments.
    """
    if not operator.dynamic_shape:
        return False
    name = operator.name
    if name == "aten::index.Tensor":
        return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(arguments[1]))
    if name == "aten::linalg_lstsq":
        return arguments[3] not in (None, "gelsy")  # residuals are left empty by this driver
    # Of ctc_loss only the second result varies, with lengths that every execution compares.
    return name not in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor")


def shape_sources(name: str, arguments: list[Any]) -> list[torch.Tensor]:
    """The tensors on whose values an operator's result shapes may depend."""
    return tensors_in(arguments[1] if name == "aten::masked_select" else arguments)


def argument_data(argument: Any) -> Argument:
    """An operator argument that is neither tensor, list nor generator, as a Program holds it.

    Raises:
        CaptureError: a Program cannot hold it.
    """
    if isinstance(argument, torch.dtype):
        return Symbol("dtype", dtype_name(argument))
    if isinstance(argument, torch.device):
        return Symbol("device", argument.type)
    if isinstance(argument, torch.layout):
        return Symbol("layout", str(argument).removeprefix("torch."))
    if isinstance(argument, torch.memory_format):
        return Symbol("memory_format", str(argument).removeprefix("torch."))
    if argument is None or isinstance(argument, (bool, int, float, complex, str)):
        return argument
    raise CaptureError(
        f"{user_location()}: an operator takes a {type(argument).__qualname__}, which a program "
        "cannot hold"
    )


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that equality is that of bits (NaN, -0.0)."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = torch._conj(plain)
    if plain.is_neg():
        plain = torch._neg_view(plain)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGER_OF_SIZE[plain.element_size()])

"""The Python state that a captured callable can reach, and whether a call changed it.

A replay runs no Python, so assignments of the call to attributes, variables or containers would not
happen again. The state is everything that a module, a function or a callable object refers to:
attributes, closed-over variables, defaults, the globals and methods that its code names, and what
these hold in turn.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.constants import PLAIN_TYPES, same_constant
from offload.record.compiled_callables import is_compiled_function, is_compiling, original_of

# Depth to which state is followed: containers and objects below a module or a variable, and
# functions below the called function. Submodules count as their module.
_DEPTH = 6
_FUNCTION_DEPTH = 3

_PLAIN = frozenset({*PLAIN_TYPES, bytes, torch.dtype, torch.device})

# Attributes that every module has are torch's bookkeeping, except `training`; transformers notes at
# the first call that it has attached its hooks to the modules, which changes no result.
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "_output_capturing_hooks_installed"
}

# Packages whose objects and functions are not inspected: they manage their state themselves.
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "triton", "numpy", "offload"})
_TRAINERS = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_PLAIN_OBJECTS = (types.SimpleNamespace, collections.UserDict, collections.UserList)

# Attributes that schedulers and scalers set in an optimizer (torch/optim/lr_scheduler.py,
# torch/amp/grad_scaler.py), and that torch's optimizers set at their first step.
_SET_IN_OPTIMIZERS = frozenset(
    {
        "_need_device_dtype_check_for_fused",
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "found_inf",
        "grad_scale",
        "step",
    }
)

# Items of a class that are not state.
_METHODS = (FunctionType, classmethod, staticmethod, property, functools.cached_property)

Contents = tuple[Sequence[Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A holder of state, its path, and its content before the call."""

    path: str
    owner: Any
    before: Contents

    def of(self, key: Any) -> str:
        """The path of the item with this key."""
        if isinstance(self.owner, (dict, list, tuple, collections.deque, set, frozenset)):
            return f"{self.path}[{key!r}]"
        return f"{self.path}.{key}" if self.path else str(key)

    def change(self) -> str:
        """The change since then, in words; empty if nothing changed."""
        keys, values = self.before
        keys_now, values_now = _contents(self.owner) or ((), ())
        same = len(values) == len(values_now) and all(map(operator.is_, values, values_now))
        if same and keys == keys_now:
            return ""
        if isinstance(keys, range) and len(values) != len(values_now):
            return f"{self.path}: {len(values)} items became {len(values_now)}"
        before = dict(zip(keys, values, strict=True))
        now = dict(zip(keys_now, values_now, strict=True))
        changes = (self._item(key, before, now) for key in {**before, **now})
        is_ordered = isinstance(self.owner, dict) and keys != keys_now
        return next(filter(None, changes), f"{self.path}: its keys changed order" * is_ordered)

    def _item(self, key: Any, before: dict[Any, Any], now: dict[Any, Any]) -> str:
        if key not in before:
            declared = getattr(type(self.owner), str(key), None)
            is_cached = isinstance(declared, functools.cached_property)
            return "" if is_cached else f"{self.of(key)} was added"
        if key not in now:
            return f"{self.of(key)} was removed"
        return _change(self.of(key), before[key], now[key])


class PythonState:
    """A snapshot of the state that a callable can reach.

    Owner: one Recorder.

    Attributes:
        tensors: every tensor, by the path on which it was first met and by each other attribute
            that holds it.
        compiled: every function compiled by torch.compile, or compiling itself, with its path.
        generators: every random generator.
        trainers: where the call trains, every optimizer, scheduler of learning rates and scaler of
            gradients, with its path. They change in each step, so only attributes that an optimizer
            has beside those from torch are compared here.
    """

    def __init__(self, function: object, *, trains: bool = False) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.compiled: list[tuple[str, Any]] = []
        self.generators: list[torch.Generator] = []
        self.trainers: list[tuple[str, Any]] = []
        self._trains = trains
        self._places: list[_Place] = []
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._pending: collections.deque[tuple[str, Any, int, int]] = collections.deque()
        self._enter("", function, _DEPTH, _FUNCTION_DEPTH)
        while self._pending:
            self._enter(*self._pending.popleft())

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every module."""
        owners = (place.owner for place in self._places)
        return [one for one in owners if isinstance(one, torch.nn.Module)]

    def check(self) -> None:
        """Compare with the state now.

        Raises:
            CaptureError: something was assigned, added or removed; the message names it.
        """
        if change := self.change():
            raise CaptureError(
                f"the call changed an attribute or variable ({change}), which a replay would not "
                "do again: keep state in tensors that are written in place (self.x.copy_(...)), "
                "or pass it as an argument and return it; for state that only the first call "
                "sets, make one call before the capture"
            )

    def change(self) -> str:
        """The first change since the snapshot, in words; empty if nothing changed."""
        return next(filter(None, (place.change() for place in self._places)), "")

    def _enter(self, path: str, thing: Any, depth: int, function_depth: int) -> None:
        """Note the content of `thing`, and put what it refers to on the list."""
        if isinstance(thing, torch.Tensor):
            self.tensors.append((path, thing))
            return
        if self._is_whole(path, thing):
            return
        is_wrapper = _is_wrapper(thing)
        if (is_wrapper and is_compiled_function(thing)) or is_compiling(thing):
            self.compiled.append((path, thing))
        if isinstance(thing, (MethodType, functools.partial)) or is_wrapper:
            for part_path, part in _parts_called(path, thing):
                self._pending.append((part_path, part, depth, function_depth))
            return
        is_function = isinstance(thing, FunctionType)
        if id(thing) in self._seen or (function_depth if is_function else depth) == 0:
            return
        contents = _contents(thing)
        if contents is None:
            return
        self._seen.add(id(thing))
        is_module = isinstance(thing, torch.nn.Module)
        place = _Place(path or ("" if is_function else "self"), thing, contents)
        self._places.append(place)
        for key, item in zip(*contents, strict=True):
            if type(item) in _PLAIN:
                continue
            if isinstance(item, torch.Tensor) or (is_module and isinstance(item, torch.nn.Module)):
                self._enter(place.of(key), item, depth, function_depth)
            else:
                below = (depth, function_depth - 1) if is_function else (depth - 1, function_depth)
                self._pending.append((place.of(key), item, *below))
        if not is_function:
            self._enter_class(type(thing), depth, function_depth)

    def _is_whole(self, path: str, thing: Any) -> bool:
        """Note an object that is kept whole; return whether nothing below it is visited."""
        if type(thing) is torch.Generator:
            self.generators.append(thing)
        is_trainer = self._trains and isinstance(thing, _TRAINERS)
        if is_trainer:
            self._enter_trainer(path, thing)
        return is_trainer and not isinstance(thing, torch.optim.Optimizer)

    def _enter_trainer(self, path: str, thing: Any) -> None:
        """Note a trainer, and the optimizer that a scheduler serves."""
        if any(thing is known for _, known in self.trainers):
            return
        self.trainers.append((path, thing))
        served = getattr(thing, "optimizer", None)
        if isinstance(served, torch.optim.Optimizer) and not isinstance(
            thing, torch.optim.Optimizer
        ):
            self._pending.append((f"{path}.optimizer", served, _DEPTH, _FUNCTION_DEPTH))

    def _enter_class(self, cls: type, depth: int, function_depth: int) -> None:
        """Note the class's own attributes, and the functions that a call of an instance runs."""
        if cls in self._classes or _is_foreign(cls.__module__):
            return
        self._classes.add(cls)
        for base in cls.__mro__:
            if not _is_foreign(base.__module__):
                self._pending.append((base.__qualname__, base, depth - 1, function_depth))
        for function in _methods_run(cls):
            self._pending.append(("", function, depth, function_depth))


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """The attributes that torch gives to optimizers."""
    return _SET_IN_OPTIMIZERS.union(vars(torch.optim.Adam([torch.zeros(1)])))


def _contents(thing: Any) -> Contents | None:
    """Keys and values of a holder of state; None for other objects, which count by identity."""
    if isinstance(thing, torch.optim.Optimizer):
        attributes = vars(thing).items()
        named: dict[Any, Any] = {
            name: one for name, one in attributes if name not in _of_every_optimizer()
        }
    elif isinstance(thing, torch.nn.Module):
        named = dict(thing._parameters.items())
        named.update(thing._buffers.items())
        named.update(
            (name, value) for name, value in vars(thing).items() if name not in _BOOKKEEPING
        )
        named.update(thing._modules.items())
    elif isinstance(thing, (list, tuple, collections.deque)):
        return range(len(thing)), tuple(thing)
    elif isinstance(thing, dict):  # bypasses a subclass's methods, which might load lazy items
        return tuple(dict.keys(thing)), tuple(dict.values(thing))
    elif isinstance(thing, (set, frozenset)):
        named = dict.fromkeys(thing)
    elif isinstance(thing, FunctionType):
        if _is_foreign(thing.__globals__.get("__name__", "")):
            return None
        named = dict(_names_of(thing))
    elif isinstance(thing, type):
        if _is_foreign(thing.__module__):
            return None
        named = {
            name: value
            for name, value in vars(thing).items()
            if not name.startswith("__") and not isinstance(value, _METHODS)
        }
    elif isinstance(thing, _PLAIN_OBJECTS) or not (
        isinstance(thing, ModuleType) or _is_foreign(type(thing).__module__)
    ):
        named = dict(_attributes(thing))
    else:
        return None
    return tuple(named), tuple(named.values())


def _is_wrapper(thing: Any) -> bool:
    """Whether torch.compile or torch.compiler.disable has wrapped a function."""
    return isinstance(thing, FunctionType) and "_torchdynamo_orig_callable" in vars(thing)


def _parts_called(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a bound method, a partial, or a function that torch's compiler wraps.

    The wrappers themselves cannot change.
    """
    if isinstance(thing, MethodType):
        yield path, thing.__self__
        yield "", thing.__func__
    elif isinstance(thing, FunctionType):
        yield path, original_of(thing)
    else:
        yield path, thing.func
        yield f"{path or 'partial'}.args", thing.args
        yield f"{path or 'partial'}.keywords", thing.keywords


def _is_foreign(module: object) -> bool:
    """Whether a module is foreign, by a `__module__`: None where code ran without a module.

    Classes that Cython makes of functions have a descriptor there, which is not Python's.
    """
    if module is None:
        return False
    return not isinstance(module, str) or module.partition(".")[0] in _FOREIGN


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(thing, name):
                yield name, getattr(thing, name)


def _names_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reaches by name: closure variables, defaults, globals, attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for position, value in enumerate(function.__defaults__ or ()):
        yield f"default {position}", value
    yield from (function.__kwdefaults__ or {}).items()
    for name, value in vars(function).items():
        yield f"{function.__name__}.{name}", value
    for name in set(_code_names(function.__code__)).difference(function.__code__.co_freevars):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _code_names(code: CodeType) -> Iterator[str]:
    """Yield names of globals and attributes in a function's code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def _methods_run(cls: type) -> Iterator[FunctionType]:
    """Yield methods that calling an instance runs: `forward` or `__call__`, and those they name."""
    names = collections.deque(["forward" if issubclass(cls, torch.nn.Module) else "__call__"])
    seen = set(names)
    while names:
        method = getattr(cls, names.popleft(), None)
        if isinstance(method, FunctionType) and _is_wrapper(method):
            yield method
            method = original_of(method)
        elif isinstance(method, FunctionType) and not _is_foreign(method.__globals__["__name__"]):
            yield method
        if not isinstance(method, FunctionType):
            continue
        fresh = set(_code_names(method.__code__)) - seen
        seen |= fresh
        names.extend(sorted(fresh))


# ---- comparing -----------------------------------------------------------------------------------


def _change(path: str, before: Any, now: Any) -> str:
    if _same(before, now):
        return ""
    one, other = _text(before), _text(now)
    return f"{path}: {one} became {'another' if other == one else other}"


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same object, or equal plain data."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _PLAIN:
        return same_constant(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    return isinstance(one, (set, frozenset)) and one == other


_SHOWN = 60


def _text(value: Any) -> str:
    if type(value) in _PLAIN and len(repr(value)) <= _SHOWN:
        return repr(value)
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"

"""Symbolic numbers as Python code sees them: arithmetic that torch does not follow.

torch follows computations from a size and comparisons. It does not follow the rounding of
fractions, nor other uses of the number: its text shows no size, and it is no `int`
(torch/__init__.py, SymInt). While a call is recorded over varying sizes, its own code gets the
answers of the recorded size, and text of a size requires the recorded size.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.fx.experimental import sym_node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Identity

from offload.console.user_code import is_user_file, user_location
from offload.errors import CaptureError
from offload.record.symbolic_functions import functions, n_bits
from offload.record.symbolic_resizes import resizes

_NUMBERS: tuple[tuple[type, type], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)
# For fractions Python rounds a quotient down by its exact remainder (Objects/floatobject.c,
# float_floor_div), which can differ from the rounded quotient rounded down.
_DIVISIONS = ("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__")
# torch's operations on one or two numbers alone (torch/fx/experimental/sym_node.py,
# `magic_methods`); `round` and `sym_ite` take other arguments as well.
_OPERATIONS = tuple(
    name
    for operation in sym_node.magic_methods
    for name in (f"_{operation}", f"_sym_{operation}")
    if operation not in ("round", "sym_ite") and name in vars(sym_node.SymNode)
)
_ROUNDED = ("_add", "_sub", "_mul")


class WatchedEnvironment(ShapeEnv):
    """An environment whose numbers are watched while `watching` lasts.

    Attributes:
        refusal: the first refusal; the call may have swallowed the error.
        computed: results of operations, by their name and arguments.
    """

    refusal: CaptureError | None = None

    def __init__(self, **options: Any) -> None:
        """Begin without results; the options are torch's."""
        super().__init__(**options)
        self.computed: dict[tuple[Any, ...], Any] = {}


class _Watch:
    """Replacements of torch's methods while numbers are watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_watching = 0
        self._replaced: list[tuple[Any, str, Any]] = []  # with the original

    def begin(self) -> None:
        with self._lock:
            self._n_watching += 1
            if self._n_watching == 1:
                self._replace_all()

    def end(self) -> None:
        with self._lock:
            self._n_watching -= 1
            while self._n_watching == 0 and self._replaced:
                kind, name, before = self._replaced.pop()
                delattr(kind, name) if before is None else setattr(kind, name, before)

    def _replace_all(self) -> None:
        for name in _OPERATIONS:
            function = getattr(sym_node.SymNode, name)
            computed = _kept_apart(function) if name in _ROUNDED else function
            self._replace(sym_node.SymNode, name, _remembered(name, computed))
        for divided in (torch.SymInt, torch.SymFloat):
            for name in _DIVISIONS:
                self._replace(divided, name, _refused_for_fractions(getattr(divided, name)))
            self._replace(divided, "__divmod__", lambda one, other: (one // other, one % other))
            self._replace(divided, "__rdivmod__", lambda one, other: (other // one, other % one))
        for kind, plain in _NUMBERS:
            self._replace(kind, "__getattribute__", _with_class(plain))
            self._replace(kind, "__repr__", _text_of(kind, plain))
        for name, resize in resizes(is_watched):
            self._replace(torch._C._nn, name, resize)
        self._replace(torch.SymInt, "bit_length", n_bits)
        of_math: dict[int, Any] = {}
        for owner, name, function in functions(is_watched):
            if owner is math:
                of_math[id(getattr(math, name))] = function
            self._replace(owner, name, function)
        for module, name, found in _globals_of_users():
            if id(found) in of_math:
                self._replace(module, name, of_math[id(found)])

    def _replace(self, kind: Any, name: str, new: Any) -> None:
        self._replaced.append((kind, name, kind.__dict__.get(name)))
        setattr(kind, name, new)


_watch = _Watch()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watch the numbers of all `WatchedEnvironment`s; several threads may do so at once.

    Each operation on fractions is kept apart, as sympy would merge several into one. Code that is
    neither torch's nor offload's finds an `int` in a symbolic integer where it asks `isinstance`,
    and the recorded number in its text, which a guard then asks for.
    """
    _watch.begin()
    try:
        yield
    finally:
        _watch.end()


def _globals_of_users() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield each global, maybe a function's name, of modules not of torch or offload."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and (name == "__main__" or (file and is_user_file(file))):
            yield from ((module, key, found) for key, found in list(vars(module).items()))


def _kept_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def computed(self: Any, other: Any) -> Any:
        result = function(self, other)
        environment = self.shape_env
        if not isinstance(environment, WatchedEnvironment) or result.pytype is not float:
            return result
        kept = sym_node.SymNode(Identity(result._expr), environment, float, result._hint)
        return kept if result._expr.free_symbols else result

    return computed


def _remembered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A memoised function: a recording repeats the same arithmetic thousands of times.

    Symbols replaced meanwhile are replaced when an expression is read.
    """

    @functools.wraps(function)
    def computed(self: Any, *others: Any) -> Any:
        environment = self.shape_env
        if not isinstance(environment, WatchedEnvironment):
            return function(self, *others)
        key = (name, self._expr, self.pytype, *[(one._expr, one.pytype) for one in others])
        result = environment.computed.get(key)
        if result is None:
            result = environment.computed[key] = function(self, *others)
        return result

    return computed


def _refused_for_fractions(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def computed(self: Any, other: Any) -> Any:
        result = function(self, other)
        environment = getattr(self.node, "shape_env", None)
        if type(result) is torch.SymFloat and isinstance(environment, WatchedEnvironment):
            refusal = CaptureError(
                f"{user_location()}: a size is in a division of fractions by // or %, which cannot "
                "be repeated exactly for other sizes: use math.floor(a / b), or integers"
            )
            environment.refusal = environment.refusal or refusal
            raise refusal
        return result

    return computed


def _with_class(plain: type) -> Callable[[Any, str], Any]:
    """Attribute access of numbers whose class, which `isinstance` reads too, is a plain one's."""

    def found(self: Any, name: str) -> Any:
        if name == "__class__" and _asked_by_user(self):
            return plain
        return object.__getattribute__(self, name)

    return found


def _text_of(kind: Any, plain: Callable[[Any], Any]) -> Callable[[Any], str]:
    original = kind.__repr__

    @functools.wraps(original)
    def text(self: Any) -> str:
        found: str = repr(plain(self)) if _asked_by_user(self) else original(self)
        return found

    return text


def _asked_by_user(number: Any) -> bool:
    """Whether a number is watched, and the code that asks is neither torch's nor offload's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        is_users = _is_users(frame.f_code.co_filename)
        if is_users is not None:
            return is_users and is_watched(number)
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool | None:
    """Whether a file is the user's; None for generated code, which acts for its caller."""
    return None if filename.startswith("<") else is_user_file(filename)


def is_watched(number: Any) -> bool:
    """Whether a number is a symbol of a recording."""
    node = getattr(number, "node", None)
    return isinstance(getattr(node, "shape_env", None), WatchedEnvironment)

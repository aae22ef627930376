"""The source of a Triton kernel as one module, with all that it uses from its user's modules.

Triton compiles a function's text in the namespace of its module, and refuses what it finds there
except kernels, constants and its own functions (`DependenciesFinder` in triton/runtime/jit.py and
`_define_name_lookup` in triton/compiler/code_generator.py, 3.7). The same is written out here.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import symtable
import sys
from types import ModuleType
from typing import Any

_FUTURE = "from __future__ import annotations\n"  # names in annotations need not exist
_HEADER = f"{_FUTURE}import triton as _triton\nimport triton.language as _tl\n"
_RESERVED = ("_triton", "_tl")


class UnknownSource(Exception):
    """A kernel's source cannot stand in a module of its own; the message says why."""


def source_of(kernel: Any) -> str:
    """The text of a module that defines a kernel under the name in its own text.

    Constants have the values that they have now.

    Args:
        kernel: a `triton.JITFunction`.

    Raises:
        UnknownSource: it uses something that the text of a module cannot contain.
    """
    module = _Module()
    module.add_function(kernel, defined_name(kernel.src))
    return _HEADER + "\n".join(module.lines) + "\n"


def defined_name(text: str) -> str:
    """The name of the function that a text defines."""
    return text[len("def ") : text.index("(")].strip()


class _Module:
    """A module in the making.

    Attributes:
        lines: its text so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._functions: set[int] = set()

    def add_function(self, function: Any, name: str) -> None:
        """Define a function of Triton, behind all that it uses, and give it this name."""
        if getattr(function, "is_gluon", bool)():
            raise UnknownSource(f"{name} is written in Gluon")
        text = function.src
        defined = defined_name(text)
        if id(function) not in self._functions:
            self._functions.add(id(function))
            self._claim(defined, function)
            scope = function.fn.__globals__ | inspect.getclosurevars(function.fn).nonlocals
            for used in _names_used(text):
                if used != defined or scope.get(used) is not None:
                    self._add(used, scope)
            self.lines += [_decorator(function), text.rstrip(), ""]
        if name != defined:
            self._claim(name, function)
            self.lines.append(f"{name} = {defined}")

    def _claim(self, name: str, thing: Any) -> bool:
        """Note what a name stands for; return whether it is new.

        Raises:
            UnknownSource: it stands for something else already.
        """
        known = self._names.get(name, self)
        if known is self:
            self._names[name] = thing
            return True
        if known is not thing and not (type(known) is type(thing) and known == thing):
            raise UnknownSource(f"{name} stands for different things in functions that it calls")
        return False

    def _add(self, name: str, scope: dict[str, Any]) -> None:
        """Define a name that a function uses."""
        if name not in scope:
            return  # a builtin, or Triton will refuse it
        if name in _RESERVED or keyword.iskeyword(name):
            raise UnknownSource(f"it uses the name {name}")
        thing = _plain(scope[name])
        if is_function(thing):
            if self._names.get(name, self) is self or id(thing) not in self._functions:
                self.add_function(thing, name)
            else:
                self._claim(name, thing)
            return
        if thing is getattr(builtins, name, self):
            return
        if self._claim(name, thing):
            self.lines.append(_definition(name, thing))


def is_function(thing: Any) -> bool:
    """Whether it is a function that Triton compiles."""
    from triton.runtime.jit import JITCallable  # noqa: PLC0415 - only where a kernel exists

    return isinstance(thing, JITCallable)


def jit_function(kernel: Any) -> Any:
    """The `JITFunction` of a kernel, also of one that Triton interprets (TRITON_INTERPRET=1)."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    return (
        JITFunction(kernel.fn, **kernel.kwargs) if type(kernel) is InterpretedFunction else kernel
    )


_interpreted: dict[int, tuple[Any, Any]] = {}


def _plain(thing: Any) -> Any:
    """The thing; a kernel that Triton interprets as a JITFunction, the same each time."""
    if type(thing).__name__ != "InterpretedFunction":
        return thing
    known = _interpreted.get(id(thing))
    if known is None or known[0] is not thing:
        known = _interpreted[id(thing)] = (thing, jit_function(thing))
    return known[1]


def _names_used(text: str) -> list[str]:
    """The names outside of a function that its text uses, without those in annotations."""
    table = symtable.symtable(_FUTURE + text, "<kernel>", "exec")
    found = [one.get_name() for one in table.get_symbols() if one.is_referenced()]
    tables = list(table.get_children())
    while tables:
        one = tables.pop()
        if one.get_type() == "function":
            found += one.get_globals()  # type: ignore[attr-defined]
        tables += one.get_children()
    return sorted(dict.fromkeys(found))


def _decorator(function: Any) -> str:
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    if not isinstance(function, JITFunction):
        return "@_triton.constexpr_function"
    return "@_triton.jit(noinline=True)" if function.noinline else "@_triton.jit"


def _definition(name: str, thing: Any) -> str:
    """A line that gives a name its value.

    Raises:
        UnknownSource: the value has no text.
    """
    from triton.language.core import constexpr  # noqa: PLC0415

    if isinstance(thing, ModuleType):
        if thing.__name__.partition(".")[0] not in ("triton", "math"):
            raise UnknownSource(f"it uses the module {thing.__name__}, as {name}")
        return f"import {thing.__name__} as {name}"
    if isinstance(thing, constexpr):
        return f"{name} = _tl.constexpr({_literal(name, thing.value)})"
    module = getattr(thing, "__module__", None) or ""
    own = getattr(thing, "__name__", "")
    is_own = module.partition(".")[0] == "triton" and bool(own)
    if is_own and getattr(sys.modules.get(module), own, None) is thing:
        return f"from {module} import {own} as {name}"
    return f"{name} = {_literal(name, thing)}"


def _literal(name: str, thing: Any) -> str:
    from triton.language.core import dtype  # noqa: PLC0415

    if thing is None or type(thing) in (bool, int, str):
        return repr(thing)
    if type(thing) is float:
        return f"float({repr(thing)!r})"
    if type(thing) is dtype:
        return f"_tl.dtype({thing.name!r})"
    if type(thing) is tuple:
        return "(" + "".join(f"{_literal(name, one)}, " for one in thing) + ")"
    raise UnknownSource(f"it uses {name}, a {type(thing).__qualname__}")

"""Functions of the user's in torch's own tables of Inductor: lowerings, decompositions, patterns.

Private parts of torch 2.13: `lowerings` and `user_lowerings` (torch/_inductor/lowering.py),
`decompositions` (torch/_inductor/decomposition.py), and the objects of PatternMatcherPass that the
modules of torch/_inductor/fx_passes hold. Only tables of loaded modules are read: nothing can be
registered in others.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch

from offload.console.user_code import is_user_file

_TABLES = (
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "user_lowerings"),
    ("torch._inductor.decomposition", "decompositions"),
)
_PASSES = "torch._inductor.fx_passes."
_NAMESPACES = ("aten", "prims")
"""Of operators whose meaning is torch's. What lowers a user's own operator, its owner says."""


def tables_of_user() -> tuple[str, ...]:
    """The tables of Inductor in which functions of the user's stand for operators of torch's."""
    found = []
    for module, name in _TABLES:
        table: Mapping[Any, Any] = getattr(sys.modules.get(module), name, {})
        if any(_is_foreign(one) and _is_torchs_operator(key) for key, one in [*table.items()]):
            found.append(f"{module}.{name}")
    found += [name for name, one in _passes() if any(map(_is_foreign, _functions_of(one)))]
    return tuple(dict.fromkeys(found))


def _is_torchs_operator(key: Any) -> bool:
    if isinstance(key, torch._ops.OpOverload):
        return key.namespace in _NAMESPACES
    return (
        isinstance(key, torch._ops.OpOverloadPacket)
        and key._qualified_op_name.partition("::")[0] in _NAMESPACES
    )


def _passes() -> Iterator[tuple[str, Any]]:
    """The passes of patterns that Inductor's modules hold, with their paths."""
    matcher = sys.modules.get("torch._inductor.pattern_matcher")
    if matcher is None:
        return
    for module_name, module in [*sys.modules.items()]:
        if module is not None and module_name.startswith(_PASSES):
            for name, held in [*vars(module).items()]:
                for one in _items(held):
                    if type(one) is matcher.PatternMatcherPass:
                        yield f"{module_name}.{name}", one


def _items(held: Any) -> list[Any]:
    if isinstance(held, Mapping):
        return [*held.values()]
    return [*held] if isinstance(held, (list, tuple)) else [held]


def _functions_of(one: Any) -> Iterator[Callable[..., Any]]:
    """The functions that the entries of a pass call."""
    for entries in [*one.patterns.values()]:
        for entry in entries:
            for name in ("extra_check", "handler", "normalize_args"):
                function = getattr(entry, name, None)
                if function is not None:
                    yield function


_others: weakref.WeakSet[FunctionType] = weakref.WeakSet()
"""Functions known not to be the user's; the tables have thousands of them."""


def _is_foreign(function: Any) -> bool:
    """Whether a function, or one that it closes over, is the user's.

    A function that torch makes of a user's (`register_replacement`, `register_lowering`) has it
    in its closure.
    """
    if isinstance(function, FunctionType) and function in _others:
        return False
    is_foreign = any(map(_is_users, _reached(function, set())))
    if isinstance(function, FunctionType) and not is_foreign:
        _others.add(function)
    return is_foreign


def _reached(thing: Any, known: set[int]) -> Iterator[Any]:
    if id(thing) in known:
        return
    known.add(id(thing))
    if isinstance(thing, functools.partial):
        for one in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _reached(one, known)
    elif isinstance(thing, (list, tuple)):
        for one in thing:
            yield from _reached(one, known)
    elif isinstance(thing, MethodType):
        yield from _reached(thing.__func__, known)
    elif isinstance(thing, FunctionType):
        yield thing
        for cell in thing.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from _reached(content, known)


def _is_users(function: FunctionType) -> bool:
    """Whether its text is neither torch's, nor an installed package's, Python's or generated.

    By its file, as `functools.wraps` gives a function the name of another one's module.
    """
    file = function.__code__.co_filename
    return is_user_file(file) and not file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of Python's library and of installed packages, of any scheme."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names}
    folders |= {one for one in sys.path if _is_of_packages(one)}
    return tuple(one.rstrip(os.sep) + os.sep for one in folders)


def _is_of_packages(folder: str) -> bool:
    return os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages")

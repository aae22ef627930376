"""The types of a result's containers, which a file holds by name only.

A name from a file stands only for one of these classes: `torch.return_types`, `torch.Size` and
`OrderedDict`; outputs of transformers' models and the caches in them, the only case in which a
module is imported because a file names it; and the user's (`types=`). Each class is tried around
stand-ins of the result's tensors. Any other container becomes a plain one.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from offload.errors import BindingError, FileError
from offload.interpreter.torch_names import find_dtype, torch_object
from offload.program import Program, with_objects
from offload.program.structure import Structure, is_rebuilt, name_of, rebuild

_PLAIN_NAMES = ("", *(name_of(cls) for cls in (list, tuple, dict)))
_SINGLE_CLASSES = {name_of(cls): cls for cls in (collections.OrderedDict, torch.Size)}
# By kind of container: the modules of transformers that may be imported for it, and the module and
# names of the classes of which its class must be a subclass.
_OF_TRANSFORMERS = {
    "mapping": (
        re.compile(
            r"transformers\.(modeling_outputs|models\.\w{1,100}\.modeling_\w{1,100})", re.ASCII
        ),
        "transformers.utils",
        ("ModelOutput",),
    ),
    "object": (
        re.compile(r"transformers\.cache_utils"),
        "transformers.cache_utils",
        ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin"),
    ),
}


def check_types(types: Sequence[type]) -> tuple[type, ...]:
    """The classes of `types=`, each once.

    Raises:
        BindingError: it is not a sequence, or contains something other than a class.
    """
    if not isinstance(types, (list, tuple, set, frozenset)):
        raise BindingError(f"types=: expected a list of classes, got {types!r}")
    for cls in types:
        if not isinstance(cls, type):
            raise BindingError(f"types=: expected classes, got {cls!r}")
    return tuple(dict.fromkeys(types))


def with_types(program: Program, types: Sequence[type] = ()) -> Structure:
    """The nesting of a Program's result, with objects and the classes that are found for it.

    Args:
        program: a checked Program.
        types: the user's classes, from `check_types`.

    Raises:
        FileError: one of `types` matches no container, or several, or does not fit its container.
    """
    structure = with_objects(program.result_structure, torch_object)
    names = list(dict.fromkeys(_names(structure)))
    try:
        return _Search(program, _choose(types, names)).visit(structure)[0]
    except FileError as error:
        raise FileError(
            f"{error}; the containers of the result are named {', '.join(names) or 'nothing'}"
        ) from error


def types_not_found(program: Program) -> list[str]:
    """The names of the result's containers that are found only through `types=`."""
    return list(dict.fromkeys(_names(with_types(program))))


def _names(structure: Structure) -> Iterator[str]:
    """The names of non-plain containers without a class."""
    if structure.container is None and structure.type_name not in _PLAIN_NAMES:
        yield structure.type_name
    for child in structure.children:
        yield from _names(child)


def _choose(types: Sequence[type], names: Sequence[str]) -> dict[str, type]:
    """The class for each name: of the same qualified name, else of the same name in its module.

    Raises:
        FileError: no name matches a class, or several do.
    """
    if len({name_of(cls) for cls in types}) < len(types):
        raise FileError("types= has several classes of one name: give classes with different names")
    chosen = {name_of(cls): cls for cls in types if name_of(cls) in names}
    for cls in types:
        if name_of(cls) in names:
            continue
        ending = f".{cls.__qualname__}"
        found = [name for name in names if name not in chosen and name.endswith(ending)]
        if len(found) != 1:
            raise FileError(
                f"types= has {name_of(cls)}, and {'several' if found else 'none'} of the result's "
                "containers have its name: give classes that each match one container"
            )
        chosen[found[0]] = cls
    return chosen


class _Search:
    """Finds classes for containers, from the leaves up, and builds each once as a check.

    The check uses tensors of the shapes and dtypes of the result's, with all elements at one place.
    """

    def __init__(self, program: Program, chosen: Mapping[str, type]) -> None:
        self._chosen = chosen
        self._found: dict[tuple[str, str], type | None] = {}
        self._stand_ins = [
            torch.empty((), dtype=find_dtype(one.view.dtype), device="cpu").expand(one.view.shape)
            for one in program.results
        ]

    def visit(self, node: Structure) -> tuple[Structure, Any]:
        """Return a node with the classes of all below it, and the object built around stand-ins.

        Raises:
            FileError: a user's class does not fit.
        """
        if node.kind == "tensor":
            return node, self._stand_ins[node.leaf]
        if node.kind == "constant":
            return node, node.constant
        visited = [self.visit(child) for child in node.children]
        items = [item for _, item in visited]
        plain = dataclasses.replace(node, children=tuple(child for child, _ in visited))
        cls = self._class_of(node)
        if cls is None:
            return plain, rebuild(plain, items)
        typed = dataclasses.replace(plain, container=cls)
        try:
            built = rebuild(typed, items)
            problem = "" if is_rebuilt(built, typed, items, _is_tensor) else "it holds other items"
        except Exception as error:  # a constructor may raise anything
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return typed, built
        if node.type_name in self._chosen:
            raise FileError(
                f"types= has {name_of(cls)}, which does not fit the file's {node.type_name}, a "
                f"{node.kind} of {list(node.keys) or len(items)} ({problem}): give the class as it "
                "was when the program was saved"
            )
        return plain, rebuild(plain, items)

    def _class_of(self, node: Structure) -> type | None:
        key = node.kind, node.type_name
        if key not in self._found:
            self._found[key] = self._chosen.get(node.type_name) or _library_class(*key)
        return self._found[key]


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)


def _library_class(kind: str, name: str) -> type | None:
    """The class of torch, Python or transformers that a name stands for, if it is allowed.

    It must be defined in its module under that very name: no name leads through another module.
    """
    if name in _SINGLE_CLASSES:
        return _SINGLE_CLASSES[name]
    module_name, _, class_name = name.rpartition(".")
    bases: tuple[type, ...] = ()
    module: ModuleType | None = None
    if kind == "tuple" and module_name == "torch.return_types":
        module, bases = torch.return_types, (tuple,)
    elif kind in _OF_TRANSFORMERS:
        modules, base_module, base_names = _OF_TRANSFORMERS[kind]
        if modules.fullmatch(module_name) and (module := _imported(module_name)):
            found = (getattr(_imported(base_module), one, None) for one in base_names)
            bases = tuple(base for base in found if base is not None)
    cls = vars(module).get(class_name) if module else None
    if not isinstance(cls, type) or not issubclass(cls, bases) or name_of(cls) != name:
        return None
    return cls


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # missing, or a library that it needs is missing or does not fit
        return None

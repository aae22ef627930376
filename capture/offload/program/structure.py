"""The nesting of a call's arguments or result, without its tensors.

`torch.utils._pytree` knows the standard containers. A Structure also takes objects that carry
tensors as attributes (key-value caches), and can be written to a file and rebuilt, as plain
containers, where the objects' classes do not exist.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any

from offload.program.constants import (
    PLAIN_TYPES,
    content_of,
    is_immutable,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """One node of the nesting.

    Attributes:
        kind: `tensor` (a leaf), `constant`, `list`, `tuple`, `dict`, `record` (a tuple with named
            fields), `mapping` (a user's mapping class) or `object` (attributes).
        children: the nodes below, in order; empty for leaves and constants.
        keys: the keys of a dict or mapping, the field names of a record or object.
        leaf: a tensor's position in the list of tensors.
        constant: a constant's value.
        type_name: qualified name of the container's class.
        container: the class itself; None in a Program from a file, except for the types of results
            that were found.
    """

    kind: str
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    leaf: int = -1
    constant: Any = dataclasses.field(default=None, compare=False)
    type_name: str = ""
    container: type | None = dataclasses.field(default=None, compare=False)


class OpaqueStructure(Exception):
    """An object's tensors cannot be listed: it contains itself, is too deep, or hides tensors."""


TOO_DEEP = (
    "it is nested deeper than Python can follow (sys.getrecursionlimit()): use flatter containers"
)


def flatten(
    tree: Any, is_tensor: Callable[[Any], bool], *, share_same: bool
) -> tuple[list[Any], Structure]:
    """List the tensors in `tree` and describe the nesting.

    With `share_same` an object at several places counts once (a result keeps its identities);
    without it every place counts separately (two arguments may be given different tensors).

    Returns:
        The tensors in order of first appearance, and the Structure whose leaves index them.

    Raises:
        OpaqueStructure: a container contains itself, is nested deeper than Python can follow, or
            cannot be rebuilt around other tensors (a set, an iterator, an object with slots, a
            class whose constructor takes something other than the items).
    """
    found = _Flattening(is_tensor, share_same)
    try:
        structure = found.visit(tree)
    except RecursionError:
        raise OpaqueStructure(TOO_DEEP) from None
    return found.tensors, structure


class _Flattening:
    """The tensors found so far, and where.

    A local function that calls itself is a reference cycle, and would keep them until the garbage
    collector runs.
    """

    def __init__(self, is_tensor: Callable[[Any], bool], share_same: bool) -> None:
        self.tensors: list[Any] = []
        self._is_tensor = is_tensor
        self._share_same = share_same
        self._positions: dict[int, int] = {}
        self._open_containers: set[int] = set()

    def visit(self, node: Any) -> Structure:
        """Describe a node, and all below it."""
        if self._is_tensor(node):
            if not self._share_same or id(node) not in self._positions:
                self._positions[id(node)] = len(self.tensors)
                self.tensors.append(node)
            return Structure("tensor", leaf=self._positions[id(node)])
        if isinstance(node, PLAIN_TYPES):
            return Structure("constant", constant=node)
        parts = parts_of(node, self._is_tensor)
        if parts is None:
            if _hides_tensor(node, self._is_tensor):
                raise OpaqueStructure(
                    f"a {type(node).__qualname__} holds a tensor; use lists, tuples, dicts, "
                    "dataclasses or objects with attributes"
                )
            return Structure("constant", constant=node)
        if any(self._is_tensor(key) or _hides_tensor(key, self._is_tensor) for key in parts[1]):
            raise OpaqueStructure("a tensor is the key of a mapping; use it as a value")
        if id(node) in self._open_containers:
            raise OpaqueStructure(f"{type(node).__qualname__} contains itself")
        self._open_containers.add(id(node))
        kind, keys, items = parts
        children = tuple(self.visit(item) for item in items)
        self._open_containers.discard(id(node))
        cls = type(node)
        structure = Structure(kind, children, keys, type_name=name_of(cls), container=cls)
        _check_rebuilds(structure, node, items, self._is_tensor)
        return structure


def name_of(cls: type) -> str:
    """The qualified name of a class, as in files."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_rebuilds(
    structure: Structure, node: Any, items: list[Any], is_tensor: Callable[[Any], bool]
) -> None:
    """Check that a container of a user's class is rebuilt unchanged.

    Raises:
        OpaqueStructure: its class cannot be called with the items, or it has other attributes.
    """
    cls = type(node)
    if cls in (list, tuple, dict):
        return
    name, advice = name_of(cls), "use a plain list, tuple or dict"
    if structure.kind != "object":
        attributes = getattr(node, "__dict__", {})
        extra = [one for one in attributes if one not in structure.keys]
        # A mapping may keep its items, or fields that are None, as attributes.
        if any(attributes[one] is not None for one in extra) and isinstance(
            node, (list, tuple, dict)
        ):
            raise OpaqueStructure(
                f"a {name} has the attributes {extra} besides its items; {advice}"
            )
    try:
        same = is_rebuilt(rebuild(structure, items), structure, items, is_tensor)
    except Exception as error:  # a user's constructor may raise anything
        raise OpaqueStructure(
            f"a {name} cannot be built again around other tensors ({error}); {advice}"
        ) from error
    if not same:
        raise OpaqueStructure(f"a {name} built again from its items is not the same; {advice}")


def is_rebuilt(
    rebuilt: Any, structure: Structure, items: list[Any], is_tensor: Callable[[Any], bool]
) -> bool:
    """Whether the result of `rebuild` is of the container's class, and holds just these items."""
    parts = parts_of(rebuilt, is_tensor)
    if type(rebuilt) is not structure.container:
        return False
    # An object without tensors has no parts: nothing of it can be lost.
    if parts is None:
        return structure.kind == "object"
    return (
        parts[:2] == (structure.kind, structure.keys)
        and len(parts[2]) == len(items)
        and all(map(operator.is_, parts[2], items))
    )


def parts_of(
    node: Any, is_tensor: Callable[[Any], bool]
) -> tuple[str, tuple[Any, ...], list[Any]] | None:
    """Kind, keys and items of a container; None if `node` is a constant."""
    kind = ""
    keys: tuple[Any, ...] = ()
    items: list[Any] = []
    if isinstance(node, list):
        kind, items = "list", list(node)
    elif isinstance(node, tuple):
        keys = tuple(getattr(node, "_fields", ()))
        kind, items = ("record" if keys else "tuple"), list(node)
    elif isinstance(node, Mapping):
        kind = "dict" if type(node) is dict else "mapping"
        keys, items = tuple(node), list(node.values())
    elif not isinstance(node, type) and _holds_tensor(node, is_tensor, set()):
        attributes = vars(node)
        kind, keys, items = "object", tuple(attributes), list(attributes.values())
    return (kind, keys, items) if kind else None


def _holds_tensor(node: Any, is_tensor: Callable[[Any], bool], seen: set[int]) -> bool:
    """Whether lists, tuples, mappings and attributes below `node` hold a tensor."""
    if is_tensor(node):
        return True
    if isinstance(node, (*PLAIN_TYPES, type, ModuleType)) or callable(node) or id(node) in seen:
        return False
    seen.add(id(node))
    items: Iterator[Any]
    if isinstance(node, Mapping):
        items = iter(node.values())
    elif isinstance(node, (list, tuple)):
        items = iter(node)
    else:
        items = iter(getattr(node, "__dict__", {}).values())
    return any(_holds_tensor(item, is_tensor, seen) for item in items)


# How deep an object without attributes is searched for tensors.
_SEARCH_DEPTH = 4


def _hides_tensor(node: Any, is_tensor: Callable[[Any], bool], depth: int = _SEARCH_DEPTH) -> bool:
    """Whether the objects that `node` refers to (set, slots, closure, iterator) hold a tensor."""
    if isinstance(node, FunctionType):
        cells = [cell.cell_contents for cell in node.__closure__ or () if _is_filled(cell)]
        referents = [*cells, *(node.__defaults__ or ())]
    elif isinstance(node, (*PLAIN_TYPES, type, ModuleType)) or depth == 0:
        return False
    else:
        referents = gc.get_referents(node)
    return any(is_tensor(one) or _hides_tensor(one, is_tensor, depth - 1) for one in referents)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def unflatten(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Rebuild what `flatten` took apart, around other tensors.

    A missing class (in a Program opened from a file) becomes a plain container: a record becomes a
    tuple, a mapping or an object a dict.
    """
    if structure.kind == "tensor":
        return tensors[structure.leaf]
    if structure.kind == "constant":
        return structure.constant
    return rebuild(structure, [unflatten(child, tensors) for child in structure.children])


def rebuild(structure: Structure, items: list[Any]) -> Any:
    """Rebuild one container of its recorded class, or a plain one, around rebuilt items."""
    if structure.keys and structure.kind != "record":
        return _rebuild_named(structure, dict(zip(structure.keys, items, strict=True)))
    return _rebuild_sequence(structure, items)


def _rebuild_sequence(structure: Structure, items: list[Any]) -> Any:
    cls: Any = structure.container
    if structure.kind == "list":
        return items if cls in (None, list) else cls(items)
    if structure.kind == "record":
        return tuple(items) if cls is None else cls(*items)
    if structure.kind == "tuple":
        # torch.return_types.* are tuples without _fields; they take a single sequence.
        return tuple(items) if cls in (None, tuple) else cls(items)
    return _rebuild_named(structure, {})


def _rebuild_named(structure: Structure, named: dict[Any, Any]) -> Any:
    cls: Any = structure.container
    if structure.kind == "dict" or cls is None:
        return named
    if structure.kind == "mapping":
        by_keyword = dataclasses.is_dataclass(cls) and all(isinstance(key, str) for key in named)
        return cls(**named) if by_keyword else cls(named)
    rebuilt = cls.__new__(cls)
    rebuilt.__dict__.update(named)
    return rebuilt


def frozen(structure: Structure) -> Structure:
    """The structure with the present content of mutable constants, for later comparison."""
    constant = structure.constant
    if not is_immutable(constant):
        constant = content_of(constant)
    children = tuple(frozen(child) for child in structure.children)
    return dataclasses.replace(structure, children=children, constant=constant)


def constants(structure: Structure) -> Iterator[Any]:
    """The constants of a nesting, in order."""
    if structure.kind == "constant":
        yield structure.constant
    for child in structure.children:
        yield from constants(child)


def describe(structure: Structure) -> str:
    """Describe a node in a few words, for error messages."""
    if structure.kind == "tensor":
        return "a tensor"
    if structure.kind == "constant":
        return f"{structure.constant!r}"
    keys = f" with keys {list(structure.keys)}" if structure.keys else ""
    name = structure.type_name.removeprefix("builtins.") or structure.kind
    return f"a {name} of {len(structure.children)}{keys}"


def leaf_paths(structure: Structure, where: str) -> dict[int, str]:
    """Name each tensor by the first place where it appears, such as `kwargs['mask']`."""
    paths: dict[int, str] = {}

    def visit(node: Structure, path: str) -> None:
        if node.kind == "tensor":
            paths.setdefault(node.leaf, path)
        for position, child in enumerate(node.children):
            label = repr(node.keys[position]) if node.keys else str(position)
            visit(child, f"{path}[{label}]")

    visit(structure, where)
    return paths

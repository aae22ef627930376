"""Reads a Program from untrusted JSON data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from offload.errors import FileError, ProgramError
from offload.program.collectives import Group
from offload.program.encode import (
    FAMILY,
    FORMAT_NAME,
    FORMAT_VERSION,
    GROUPS,
    MAXIMUM_DEPTH,
    TRITON,
)
from offload.program.launch import Argument, Callee, Launch, Operator
from offload.program.program import Overlap, Program, Result
from offload.program.reader import MAXIMUM_INTEGER, Item, Node
from offload.program.structure import Structure
from offload.program.triton_kernels import Constant, TritonKernel
from offload.program.values import ITEM_BYTES, Role, Symbol, TensorView, Value

_ROLES = tuple(str(role) for role in Role if role not in (Role.SCRATCH, Role.DERIVED))
_STRUCTURE_KINDS = ("list", "tuple", "dict", "record", "mapping", "object")
_SYMBOL_KINDS = ("dtype", "device", "layout", "memory_format", "generator")
# Attributes of torch are looked up by these names only: any other could import a module. Whether
# the installed torch has them is checked before anything is built from them.
_TORCH_NAMES: Mapping[str, Collection[str]] = {
    "dtype": ITEM_BYTES,
    "layout": ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
    "memory_format": ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
}
_FLOATS = ("inf", "-inf", "nan")


def decode_program(root: Node) -> Program:
    """Read a Program.

    Types and names are checked here; consistency of the parts is checked by `check_file_program`.

    Raises:
        ProgramError: the data is not a Program.
        FileError: it is in a format that this version cannot read.
    """
    has_groups = GROUPS in set(root.keys())
    names = (*_PARTS, *[FAMILY] * has_family(root), *[GROUPS] * has_groups)
    parts = dict(zip(names, root.fields("format", "version", *names)[2:], strict=True))
    return Program(
        device=parts["device"].text(),
        values=tuple(_value(index, node) for index, node in enumerate(parts["values"].items())),
        launches=tuple(
            _launch(index, node) for index, node in enumerate(parts["launches"].items())
        ),
        inputs=parts["inputs"].each(_view),
        results=parts["results"].each(_result),
        arguments_structure=_structure(parts["arguments_structure"], 0),
        result_structure=_structure(parts["result_structure"], 0),
        overlaps=parts["overlaps"].each(_overlap),
        weight_views=_weight_views(parts["weights"]),
        parameter_names=parts["parameter_names"].texts(),
        keyword_only_names=parts["keyword_only_names"].texts(),
        host_reads=parts["host_reads"].texts(),
        versions={name: node.text() for name, node in parts["versions"].mapping().items()},
        groups=parts[GROUPS].each(_group) if has_groups else (),
    )


def _group(node: Node) -> Group:
    name, ranks, rank, world_size = node.fields("name", "ranks", "rank", "world_size")
    return Group(name.text(), ranks.integers(), rank.integer(), world_size.integer())


def _weight_views(node: Node) -> dict[int, tuple[TensorView, ...]]:
    holders: dict[int, tuple[TensorView, ...]] = {}
    for item in node.items():
        index, views = item.fields("value", "holders")
        if index.integer() in holders:
            index.fail("a Value that was not listed before")
        holders[index.integer()] = views.each(_view)
    return holders


_PARTS = (
    "device",
    "versions",
    "values",
    "launches",
    "inputs",
    "results",
    "arguments_structure",
    "result_structure",
    "overlaps",
    "weights",
    "parameter_names",
    "keyword_only_names",
    "host_reads",
)


def has_family(root: Node) -> bool:
    """Whether the data has the rest of a Family, under `FAMILY`, beside its Program.

    Checks the format first: a newer one may differ in everything else.

    Raises:
        ProgramError: the data does not state its format.
        FileError: it is in a format that this version cannot read.
    """
    if not {"format", "version"} <= set(root.keys()) or root.value["format"] != FORMAT_NAME:
        raise ProgramError(f"{root.where} does not state that it is an {FORMAT_NAME}")
    version = Node(root.value["version"], f"{root.where}.version").integer(1)
    if version > FORMAT_VERSION:
        raise FileError(
            f"written in format {version} by a newer offload, and this one reads formats up to "
            f"{FORMAT_VERSION}: install a newer offload"
        )
    return version == FORMAT_VERSION


def _value(index: int, node: Node) -> Value:
    on_host = "host_content" in set(node.keys())
    role, shape, strides, dtype, size_bytes, name, *content = node.fields(
        "role", "shape", "strides", "dtype", "size_bytes", "name", *["host_content"] * on_host
    )
    return Value(
        index,
        Role(role.one_of(_ROLES, "a role")),
        *_layout(shape, strides),
        _dtype(dtype),
        size_bytes.integer(),
        name.text(),
        _content(content[0]) if content else None,
    )


def _content(node: Node) -> bytes:
    digits = node.text()
    if len(digits) % 2 or not set(digits) <= set("0123456789abcdef"):
        node.fail("bytes as hexadecimal digits")
    return bytes.fromhex(digits)


def _view(node: Node) -> TensorView:
    names = ("value", "offset_bytes", "shape", "strides", "dtype", "conjugate", "negative")
    has_gradients = "requires_grad" in set(node.keys())
    value, offset_bytes, shape, strides, dtype, conjugate, negative, *gradients = node.fields(
        *names, *["requires_grad"] * has_gradients
    )
    return TensorView(
        value.integer(),
        offset_bytes.integer(),
        *_layout(shape, strides),
        _dtype(dtype),
        conjugate.boolean(),
        negative.boolean(),
        gradients[0].boolean() if gradients else False,
    )


def _layout(shape: Node, strides: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes, steps = shape.integers(), strides.integers()
    if len(steps) != len(sizes):
        strides.fail(f"{len(sizes)} strides, one for each dimension")
    # torch counts elements in 64 bits, and multiplies before it tests for zero.
    if math.prod(max(size, 1) for size in sizes) > MAXIMUM_INTEGER:
        shape.fail("a shape of fewer than 2**63 elements")
    return sizes, steps


def _dtype(node: Node) -> str:
    return _named("dtype", node).name


def _named(kind: str, node: Node) -> Symbol:
    """The name of a dtype, layout or memory format."""
    return Symbol(kind, node.one_of(_TORCH_NAMES[kind], f"a {kind}"))


def _launch(index: int, node: Node) -> Launch:
    has_ranges = "ranges" in set(node.keys())
    kind = TRITON if TRITON in set(node.keys()) else "operator"
    callee, arguments, results, reads, writes, random, guard, guards_shape, source, *ranges = (
        node.fields(
            kind,
            "arguments",
            "results",
            "reads",
            "writes",
            "random",
            "guard",
            "guards_shape",
            "source",
            *["ranges"] * has_ranges,
        )
    )
    guarded = decode_constant(guard)
    if guarded is not None and not isinstance(guarded, (bool, int, float, complex)):
        guard.fail("a number or null")
    return Launch(
        index=index,
        callee=_kernel(callee) if kind == TRITON else Operator(callee.text()),
        arguments=arguments.each(_argument),
        results=results.each(lambda item: None if item.value is None else _view(item)),
        reads=reads.integers(),
        writes=writes.integers(),
        random=random.boolean(),
        guard=guarded,
        guards_shape=guards_shape.boolean(),
        source=source.text(),
        ranges=ranges[0].texts() if ranges else (),
    )


def _kernel(node: Node) -> Callee:
    function, source, signature, constants, divisible, options, grid = node.fields(
        "function", "source", "signature", "constants", "divisible", "options", "grid"
    )
    if not function.text().isidentifier():
        function.fail("the name of a function")
    sizes = grid.each(lambda one: one.integer(1, 2**31 - 1))
    if len(sizes) != 3:
        grid.fail("three sizes")
    return TritonKernel(
        function.text(),
        source.text(),
        signature.each(lambda one: _pair(one, Node.text)),
        constants.each(lambda one: _pair(one, _constant)),
        divisible.texts(),
        options.each(lambda one: _pair(one, _constant)),
        (sizes[0], sizes[1], sizes[2]),
    )


def _pair(node: Node, read: Callable[[Node], Item]) -> tuple[str, Item]:
    items = node.items()
    if len(items) != 2:
        node.fail("a name and what it has")
    return items[0].text(), read(items[1])


def _constant(node: Node) -> Constant:
    found: Constant = decode_constant(node)
    return found


def _argument(node: Node) -> Argument:
    if type(node.value) is list:
        return node.each(_item)
    return _item(node)


def _item(node: Node) -> Argument:
    """An argument, or an item of a list; lists are not nested."""
    kind = node.only_key()
    if kind == "view":
        return _view(node.fields(kind)[0])
    if kind == "symbol":
        return _symbol(node.fields(kind)[0])
    constant = decode_constant(node)
    if not isinstance(constant, (type(None), bool, int, float, complex, str)):
        node.fail("a view, a symbol, a number, a string or null")
    return constant


def _symbol(node: Node) -> Symbol:
    kind, name = node.fields("kind", "name")
    symbol = Symbol(kind.one_of(_SYMBOL_KINDS, "a kind of symbol"), name.text())
    if symbol.kind in _TORCH_NAMES:
        _named(symbol.kind, name)
    return symbol


def _result(node: Node) -> Result:
    view, input_leaf = node.fields("view", "input_leaf")
    return Result(_view(view), input_leaf.integer(-1))


def _overlap(node: Node) -> Overlap:
    first, second, distance_bytes = node.fields("first", "second", "distance_bytes")
    return Overlap(first.integer(), second.integer(), distance_bytes.integer(-MAXIMUM_INTEGER))


def _structure(node: Node, depth: int) -> Structure:
    if depth > MAXIMUM_DEPTH:
        node.fail(f"at most {MAXIMUM_DEPTH} nested containers")
    kind = node.value.get("kind") if type(node.value) is dict else None
    if kind == "tensor":
        return Structure("tensor", leaf=node.fields("kind", "leaf")[1].integer())
    if kind == "constant":
        return Structure("constant", constant=decode_constant(node.fields("kind", "constant")[1]))
    named, type_name, keys, children = node.fields("kind", "type_name", "keys", "children")
    structure = Structure(
        named.one_of(_STRUCTURE_KINDS, "a kind of container"),
        children.each(lambda child: _structure(child, depth + 1)),
        keys.each(decode_constant),
        type_name=type_name.text(),
    )
    _check_keys(structure, keys)
    return structure


def _check_keys(structure: Structure, node: Node) -> None:
    keys = structure.keys
    if structure.kind in ("list", "tuple"):
        if keys:
            node.fail("no keys")
        return
    if len(keys) != len(structure.children) or len(set(keys)) != len(keys):
        node.fail(f"{len(structure.children)} different keys")
    if structure.kind in ("record", "object") and not all(isinstance(key, str) for key in keys):
        node.fail("names of fields")


def decode_constant(node: Node, depth: int = 0) -> Any:
    """Read what `encode_constant` wrote.

    Raises:
        ProgramError: the data is not such a constant.
    """
    if type(node.value) is int:
        return node.integer(-MAXIMUM_INTEGER - 1)
    if node.value is None or type(node.value) in (bool, float, str):
        return node.value
    kind = node.only_key()
    if kind == "tuple" and depth < MAXIMUM_DEPTH:
        return node.fields(kind)[0].each(lambda item: decode_constant(item, depth + 1))
    if kind not in _CONSTANTS:
        node.fail("a constant")
    return _CONSTANTS[kind](node.fields(kind)[0])


def _float(node: Node) -> float:
    return float(node.one_of(_FLOATS, "inf, -inf or nan"))


def _complex(node: Node) -> complex:
    parts = node.each(decode_constant)
    if [type(part) for part in parts] != [float, float]:
        node.fail("two numbers")
    return complex(*parts)


_CONSTANTS: Mapping[str, Callable[[Node], Any]] = {
    "float": _float,
    "complex": _complex,
    "device": lambda node: Symbol("device", node.text()),
    **{kind: functools.partial(_named, kind) for kind in _TORCH_NAMES},
}

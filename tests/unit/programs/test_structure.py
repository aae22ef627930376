"""Nesting taken apart, matched and rebuilt. Tensors are stand-ins: no torch is needed."""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.program.constants import same_constant
from offload.program.structure import (
    OpaqueStructure,
    Structure,
    describe,
    flatten,
    frozen,
    leaf_paths,
    unflatten,
)
from offload.program.structure_match import StructureMismatch, match


class Leaf:
    """A stand-in for a tensor."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def is_leaf(thing: Any) -> bool:
    return isinstance(thing, Leaf)


def taken_apart(tree: Any, share_same: bool = False) -> tuple[list[Any], Structure]:
    return flatten(tree, is_leaf, share_same=share_same)


def matched(structure: Structure, tree: Any) -> list[Any]:
    return match(structure, tree, is_leaf, "arguments")


def without_classes(structure: Structure) -> Structure:
    """As it comes from a file."""
    return dataclasses.replace(
        structure, container=None, children=tuple(map(without_classes, structure.children))
    )


Pair = collections.namedtuple("Pair", ["first", "second"])


class Output(collections.OrderedDict[str, Any]):
    """A user's mapping class."""


@dataclasses.dataclass
class Cache:
    keys: Any
    size: int = 0


A, B, C = Leaf("a"), Leaf("b"), Leaf("c")


# ---- flatten and unflatten ----------------------------------------------------------------------

NESTS: list[tuple[Any, list[Leaf], str]] = [
    (A, [A], "tensor"),
    ([A, 1, B], [A, B], "list"),
    ((A, (B, None)), [A, B], "tuple"),
    ({"x": A, 2: [B], (3, "y"): "z"}, [A, B], "dict"),
    (Pair(A, 5), [A], "record"),
    (Output(x=A, y=True), [A], "mapping"),
    (Cache([A, B], 3), [A, B], "object"),
    (types.SimpleNamespace(inner=types.SimpleNamespace(keys=A)), [A], "object"),
    ([], [], "list"),
    ({}, [], "dict"),
    ((), [], "tuple"),
]


@pytest.mark.parametrize(("tree", "leaves", "kind"), NESTS)
def test_round_trip(tree: Any, leaves: list[Leaf], kind: str) -> None:
    found, structure = taken_apart(tree)
    assert found == leaves
    assert structure.kind == kind
    assert matched(structure, tree) == leaves
    rebuilt = unflatten(structure, found)
    assert type(rebuilt) is type(tree)
    if not isinstance(tree, types.SimpleNamespace | Leaf):
        assert rebuilt == tree


def test_another_set_of_tensors() -> None:
    _, structure = taken_apart({"x": [A, B], "cache": Cache(C, 7)})
    rebuilt = unflatten(structure, [C, A, B])
    assert rebuilt == {"x": [C, A], "cache": Cache(B, 7)}


def test_one_tensor_at_two_places() -> None:
    found, structure = taken_apart([A, B, A], share_same=True)
    assert found == [A, B]
    rebuilt = unflatten(structure, [B, C])
    assert rebuilt == [B, C, B]
    assert taken_apart([A, B, A])[0] == [A, B, A]


def test_without_its_class_a_container_is_plain() -> None:
    tree = [Pair(A, 1), Output(x=B), Cache(C, 2)]
    found, structure = taken_apart(tree)
    plain = unflatten(without_classes(structure), found)
    assert plain == [(A, 1), {"x": B}, {"keys": C, "size": 2}]
    assert [type(one) for one in plain] == [tuple, dict, dict]


def test_a_class_lost_in_a_file_is_still_accepted() -> None:
    tree = [Pair(A, 1), Output(x=B), Cache(C, 2)]
    _, structure = taken_apart(tree)
    assert matched(without_classes(structure), tree) == [A, B, C]
    named = types.SimpleNamespace(keys=C, size=2)
    assert matched(without_classes(structure), [Pair(A, 1), Output(x=B), named]) == [A, B, C]


def cyclic_list() -> Any:
    tree: list[Any] = [A]
    tree.append(tree)
    return tree


def cyclic_object() -> Any:
    tree = types.SimpleNamespace(keys=A)
    tree.parent = tree
    return tree


def hiding_iterator() -> Any:
    return iter([A])


def hiding_set() -> Any:
    return {A}


def hiding_slots() -> Any:
    class Slotted:
        __slots__ = ("keys",)

    slotted = Slotted()
    slotted.keys = A
    return slotted


def hiding_closure() -> Any:
    hidden = Leaf("hidden")
    return lambda: hidden


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cyclic_list, "contains itself"),
        (cyclic_object, "contains itself"),
        (hiding_iterator, "holds a tensor"),
        (hiding_set, "holds a tensor"),
        (hiding_slots, "holds a tensor"),
        (hiding_closure, "holds a tensor"),
    ],
)
def test_what_cannot_be_taken_apart(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OpaqueStructure, match=message):
        taken_apart({"tree": make()})


def test_a_cycle_without_tensors_is_a_constant() -> None:
    node = types.SimpleNamespace()
    node.parent = types.SimpleNamespace(child=node)
    found, structure = taken_apart([A, node])
    assert found == [A]
    assert [one.kind for one in structure.children] == ["tensor", "constant"]


def test_the_same_container_twice_is_no_cycle() -> None:
    shared = [A]
    assert taken_apart([shared, shared])[0] == [A, A]


# ---- match --------------------------------------------------------------------------------------


@pytest.mark.parametrize("forget", [lambda structure: structure, without_classes])
@pytest.mark.parametrize("make", [dict, Output, types.SimpleNamespace])
def test_keys_in_another_order(
    make: Callable[..., Any], forget: Callable[[Structure], Structure]
) -> None:
    """Code that iterates over them would act differently."""
    _, structure = taken_apart(make(x=A, y=B))
    assert matched(forget(structure), make(x=C, y=A)) == [C, A]
    with pytest.raises(StructureMismatch, match=r"order \['x', 'y'\], got \['y', 'x'\]"):
        matched(forget(structure), make(y=C, x=A))


OtherPair = collections.namedtuple("OtherPair", Pair._fields)


@dataclasses.dataclass
class OtherCache:
    keys: Any
    size: int = 0


class Items(list[Any]):
    """A user's list class."""


class Couple(tuple[Any, ...]):
    """A user's tuple class."""


CLASSES = [
    (Pair(A, 1), OtherPair(A, 1)),
    (Cache(A), OtherCache(A)),
    (Output(x=A), collections.OrderedDict(x=A)),
    ({"x": A}, Output(x=A)),
    ([A], Items([A])),
    ((A,), Couple([A])),
]


@pytest.mark.parametrize(("one", "other"), [*CLASSES, *(pair[::-1] for pair in CLASSES)])
def test_another_class(one: Any, other: Any) -> None:
    """Code that checks the class would act differently; a file does not hold it."""
    _, structure = taken_apart(one)
    with pytest.raises(StructureMismatch) as caught:
        matched(structure, other)
    expected, _, got = str(caught.value).partition("got")
    assert type(one).__qualname__ in expected
    assert type(other).__qualname__ in got


def test_subclasses_are_rebuilt() -> None:
    for tree in (Items([A, 1]), Couple([A, 1])):
        found, structure = taken_apart(tree)
        rebuilt = unflatten(structure, found)
        assert type(rebuilt) is type(tree)
        assert rebuilt == tree
        assert type(unflatten(without_classes(structure), found)) in (list, tuple)


class Numbered(list[Any]):
    def __init__(self, number: int, items: list[Any]) -> None:
        super().__init__(items)


class Named(tuple[Any, ...]):
    """Its instances have attributes."""


class Doubled(list[Any]):
    def __init__(self, items: list[Any]) -> None:
        super().__init__([*items, *items])


def named_tuple_with_attribute() -> Any:
    named = Named([A])
    named.label = "left"
    return named


@pytest.mark.parametrize(
    "make",
    [
        lambda: Numbered(3, [A]),
        lambda: Doubled([A]),
        named_tuple_with_attribute,
        lambda: collections.defaultdict(list, x=A),
    ],
)
def test_classes_that_cannot_be_rebuilt(make: Callable[[], Any]) -> None:
    with pytest.raises(OpaqueStructure, match="plain"):
        taken_apart([make()])


@pytest.mark.parametrize(
    ("recorded", "given", "message"),
    [
        (A, 3, r"^arguments: expected a tensor, got 3$"),
        (3, A, r"^arguments: expected 3, got a tensor$"),
        ([A], A, r"expected a list of 1, got a tensor"),
        ([A], 3, r"^arguments: expected a list of 1, got 3$"),
        ({"x": A}, None, r"^arguments: expected a dict of 1 with keys \['x'\], got None$"),
        (Cache(A), "text", r"expected a .*Cache of 2.*, got 'text'$"),
        ([A, B], [A], r"^arguments: expected a list of 2, got a list of 1$"),
        ([A], (A,), r"expected a list of 1, got a tuple of 1"),
        ({"x": A}, {"y": A}, r"expected a dict of 1 with keys \['x'\], got a dict of 1 with"),
        ({"x": [A, 1]}, {"x": [A, 2]}, r"^arguments\['x'\]\[1\]: recorded with 1, got 2$"),
        ([A, True], [A, 1], r"recorded with True, got 1"),
        ([A, 1], [A, 1.0], r"recorded with 1, got 1.0"),
        ([A, 0.0], [A, -0.0], r"recorded with 0.0, got -0.0"),
        ([A, "x"], [A, None], r"recorded with 'x', got None"),
        (Pair(A, 1), (A, 1), r"expected a .*Pair of 2"),
        (Cache(A), {"keys": A, "size": 0}, r"expected a .*Cache of 2"),
    ],
)
def test_a_mismatch_names_the_place(recorded: Any, given: Any, message: str) -> None:
    _, structure = taken_apart(recorded)
    with pytest.raises(StructureMismatch, match=message):
        matched(structure, given)


class Unsure:
    """Its equality raises, or is no truth value."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no answer")

    __hash__ = None


def test_a_frozen_constant_is_compared_as_it_was() -> None:
    given = {1, 2}
    _, live = taken_apart([A, given, 3])
    kept = frozen(live)
    assert matched(kept, [B, {1, 2}, 3]) == [B]
    given.add(4)
    assert matched(live, [B, {1, 2, 4}, 3]) == [B]
    assert matched(kept, [B, {1, 2}, 3]) == [B]
    with pytest.raises(StructureMismatch, match=r"^arguments\[1\]"):
        matched(kept, [B, given, 3])


def test_constants() -> None:
    unsure = Unsure()
    for value in (None, True, 0, -0.0, math.nan, math.inf, complex(math.nan, -0.0), "", unsure):
        assert same_constant(value, value)
    assert same_constant(float("nan"), float("nan"))
    assert same_constant(complex("nan+0j"), complex("nan+0j"))
    assert not same_constant(unsure, Unsure())
    assert not same_constant(0.0, -0.0)
    assert not same_constant(1, True)


# ---- text for users ------------------------------------------------------------------------------


def test_descriptions() -> None:
    assert describe(taken_apart(A)[1]) == "a tensor"
    assert describe(taken_apart("text")[1]) == "'text'"
    assert describe(taken_apart({"x": A})[1]) == "a dict of 1 with keys ['x']"


def test_paths_name_the_first_place() -> None:
    _, structure = taken_apart(([A, B], {"mask": A, "cache": Cache(C)}), share_same=True)
    assert leaf_paths(structure, "in") == {
        0: "in[0][0]",
        1: "in[0][1]",
        2: "in[1]['cache']['keys']",
    }


# ---- anything nested ----------------------------------------------------------------------------

CONSTANTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
TREES = st.recursive(
    CONSTANTS | st.builds(Leaf),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(Output)
    ),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True, database=None)
@given(tree=TREES)
def test_anything_nested_comes_back(tree: Any) -> None:
    leaves, structure = taken_apart(tree)
    again, same_structure = taken_apart(unflatten(structure, leaves))
    assert again == leaves
    assert same_structure == structure
    assert matched(structure, tree) == leaves
    assert sorted(leaf_paths(structure, "")) == list(range(len(leaves)))

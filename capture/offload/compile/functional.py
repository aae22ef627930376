"""Makes in-place operators functional if the memory that they write is not visible elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from offload.compile.extraction import whole_view
from offload.errors import CaptureError
from offload.interpreter.torch_names import (
    dtype_name,
    find_dtype,
    find_overload,
    positional_and_named,
    symbol_object,
)
from offload.program import (
    ITEM_BYTES,
    Argument,
    Bindings,
    Callee,
    Launch,
    Operator,
    Program,
    Role,
    Symbol,
    TensorView,
    Value,
    contiguous_strides,
    same_strides,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Functional:
    """Launches that write only what they make.

    Attributes:
        recorded_end: behind the last recorded launch that they replace; later ones could not be
            followed.
        end: behind the last of them. It is larger if parts are inserted into the rest.
        program: the original with these launches in place of the recorded ones, and with the Values
            that they add behind the others.
        used_later: by Value, the launch of this program that uses it last.
    """

    recorded_end: int
    end: int
    program: Program
    used_later: Sequence[int]


_WRITES = frozenset(
    f"aten::{name}"
    for name in (
        "copy", "fill.Scalar", "fill.Tensor", "index_add", "index_copy", "index_fill.int_Scalar",
        "index_fill.int_Tensor", "index_put", "scatter.src", "scatter.value", "scatter_add", "zero",
    )
)  # fmt: skip
"""Operators with a known in-place form, besides those that torch tags as pointwise."""


def functional_name(launch: Launch) -> str:
    """The operator that returns what an in-place one writes, as a whole; empty if none is known."""
    name, dot, overload = launch.name.partition(".")
    if not (
        isinstance(launch.callee, Operator)
        and launch.callee.is_aten
        and name.endswith("_")
        and not name.endswith("__")
        and launch.results == (None,)
        and isinstance(launch.arguments[0], TensorView)
        and set(launch.writes) == {launch.arguments[0].value}
    ):
        return ""
    functional = f"{name[:-1]}{dot}{overload}"
    try:
        found, written = find_overload(functional), find_overload(launch.name)
    except CaptureError:
        return ""
    takes = [(one.name, str(one.type)) for one in found._schema.arguments]
    is_alike = takes == [(one.name, str(one.type)) for one in written._schema.arguments]
    is_known = torch.Tag.pointwise in found.tags or functional in _WRITES
    return functional if is_alike and is_known else ""


def make_functional(
    program: Program, first: int, end: int, used_later: Sequence[int]
) -> Functional | None:
    """Follow in-place writes through consecutive launches.

    A write is followed if its Value is not used behind these launches, or if they make it. Written
    parts are inserted into the rest when anything else is read.

    Args:
        program: of the launches.
        first: the first launch.
        end: behind the last one.
        used_later: `extraction.last_uses` of the program.

    Returns:
        As many launches as can be followed; None if there are none.
    """
    while end > first:
        if not any(launch.results == (None,) for launch in program.launches[first:end]):
            return Functional(end, end, program, used_later)
        try:
            return _Follower(program, first, end, used_later).followed()
        except _Cut as cut:
            end = cut.at
    return None


class _Cut(Exception):
    """The launch `at` cannot be followed."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


class _Follower:
    """Keeps the present content of each written Value."""

    def __init__(self, program: Program, first: int, end: int, used_later: Sequence[int]) -> None:
        self._program = program
        self._first, self._end = first, end
        self._values = list(program.values)
        self._used_later = list(used_later)
        self._launches: list[Launch] = []
        self._base: dict[int, int] = {}  # for a written Value: the Value with its whole content
        self._parts: dict[int, list[tuple[TensorView, int]]] = {}  # written since, separately
        self._begun = self._without_content()
        self._last_write = self._outliving()

    def followed(self) -> Functional:
        launches = self._program.launches
        for launch in launches[self._first : self._end]:
            self._launches.append(
                self._written(launch) if launch.results == (None,) else self._made(launch)
            )
        program = dataclasses.replace(
            self._program,
            values=tuple(self._values),
            launches=(*launches[: self._first], *self._launches, *launches[self._end :]),
        )
        end = self._first + len(self._launches)
        moved = end - self._end
        used_later = [at + moved if at >= self._end else at for at in self._used_later]
        return Functional(self._end, end, program, used_later)

    def _without_content(self) -> set[int]:
        """The Values that begin without content, and are first written here."""
        inside = self._program.launches[self._first : self._end]
        written = {index for launch in inside for index in launch.writes}
        before = {index for one in self._program.launches[: self._first] for index in one.writes}
        made = {view.value for launch in inside for view in launch.made()}
        roles = (Role.ACTIVATION, Role.OUTPUT)
        return {
            index for index in written - made - before if self._program.values[index].role in roles
        }

    def _outliving(self) -> dict[int, int]:
        """By Value that others use later: its last write, which also makes it."""
        made = set(self._begun)
        last: dict[int, int] = {}
        for launch in self._program.launches[self._first : self._end]:
            made |= {view.value for view in launch.made()}
            if launch.results != (None,):
                continue
            (index,) = launch.writes
            if self._used_later[index] >= self._end:
                if index not in made:
                    raise _Cut(launch.index)
                last[index] = launch.index
        return last

    def _made(self, launch: Launch) -> Launch:
        given = self._given(launch)
        results = [None if view is None else self._renamed(view) for view in launch.results]
        return self._launch(launch, launch.callee, given, tuple(results))

    def _renamed(self, view: TensorView) -> TensorView:
        """Rename a result that is written later and outlives: its name is for the last write."""
        if view.value not in self._last_write:
            return view
        named = self._new_value(self._program.values[view.value])
        self._base[view.value] = named
        return dataclasses.replace(view, value=named)

    def _written(self, launch: Launch) -> Launch:
        target = launch.arguments[0]
        assert isinstance(target, TensorView)  # as functional_name checked
        if target.value in self._begun:
            self._begin(target.value, launch)
        given = self._given(launch)
        callee = Operator(functional_name(launch))
        if callee.name in _WRITES:  # these keep the memory layout of their operand
            given = (self._gathered(given[0], launch), *given[1:])
        like = self._result_like(callee, given, launch)
        value = self._program.values[target.value]
        is_whole = target == whole_view(value) and same_strides(
            value.shape, like.strides, value.strides
        )
        if is_whole:
            like = dataclasses.replace(like, strides=value.strides)
        is_last = self._last_write.get(target.value) == launch.index
        made = target.value if is_last and is_whole else self._new_value(like)
        result = self._launch(launch, callee, given, (whole_view(self._values[made]),))
        if is_whole:
            self._base[target.value] = made
            self._parts.pop(target.value, None)
            return result
        parts = self._parts.setdefault(target.value, [])
        parts[:] = [part for part in parts if part[0] != target]
        if not all(_are_apart(target, part) for part, _ in parts):
            self._merge(target.value, launch)
            parts = self._parts.setdefault(target.value, [])
        parts.append((target, made))
        if not is_last:
            return result
        self._launches.append(result)
        self._merge(target.value, launch, is_last=True)
        return self._launches.pop()

    def _begin(self, index: int, launch: Launch) -> None:
        """Let a Value without content begin with zeros."""
        value = self._program.values[index]
        like = dataclasses.replace(value, strides=contiguous_strides(value.shape))
        if like.strides != value.strides:
            raise _Cut(launch.index)
        self._begun.discard(index)
        self._base[index] = self._new_value(like)
        callee, dtype = Operator("aten::full"), Symbol("dtype", value.dtype)
        given = (value.shape, 0, dtype, None, None, None)
        result = (whole_view(self._values[self._base[index]]),)
        self._launches.append(self._launch(launch, callee, given, result))

    def _gathered(self, argument: Argument, launch: Launch) -> TensorView:
        """A view of a whole Value, or a copy if it is a part."""
        assert isinstance(argument, TensorView)  # as functional_name checked
        if argument == whole_view(self._values[argument.value]):
            return argument
        callee = Operator("aten::clone")
        given = (argument, Symbol("memory_format", "contiguous_format"))
        copied = whole_view(self._values[self._new_value(self._result_like(callee, given, launch))])
        self._launches.append(self._launch(launch, callee, given, (copied,)))
        return copied

    def _merge(self, index: int, launch: Launch, *, is_last: bool = False) -> None:
        """Insert the written parts into the Value that holds the rest.

        Args:
            index: the Value of the parts.
            launch: the launch that needs it.
            is_last: the Value with the whole content then has the original index.
        """
        value = self._program.values[index]
        parts = self._parts.pop(index)
        for number, (part, made) in enumerate(parts, 1):
            offset, rest = divmod(part.offset_bytes, ITEM_BYTES[part.dtype])
            if rest or part.dtype != value.dtype:
                raise _Cut(launch.index)
            base = whole_view(self._values[self._base.get(index, index)])
            given = (base, whole_view(self._values[made]), part.shape, part.strides, offset)
            whole = index if is_last and number == len(parts) else self._new_value(value)
            callee = Operator("aten::as_strided_scatter")
            result = (whole_view(self._values[whole]),)
            self._launches.append(self._launch(launch, callee, given, result))
            self._base[index] = whole

    def _given(self, launch: Launch) -> tuple[Argument, ...]:
        def present(argument: Argument) -> Argument:
            if isinstance(argument, tuple):
                return tuple(present(one) for one in argument)
            return self._read(argument, launch) if isinstance(argument, TensorView) else argument

        return tuple(present(argument) for argument in launch.arguments)

    def _read(self, view: TensorView, launch: Launch) -> TensorView:
        """Where the content of a view is now."""
        for part, value in self._parts.get(view.value, ()):
            if part == view:
                return whole_view(self._values[value])
            if not _are_apart(part, view):
                self._merge(view.value, launch)
                break
        return dataclasses.replace(view, value=self._base.get(view.value, view.value))

    def _result_like(self, callee: Operator, given: tuple[Argument, ...], launch: Launch) -> Value:
        """The functional operator's result, with the layout that torch gives it."""
        overload = find_overload(callee.name)
        arguments = [_without_memory(one) for one in given]
        positional, named = positional_and_named(overload, arguments)
        try:
            found = overload(*positional, **named)
        except RuntimeError as error:  # as for boolean indices, whose count is unknown
            raise _Cut(launch.index) from error
        target = launch.arguments[0]
        assert isinstance(target, TensorView)  # as functional_name checked
        shape, dtype = tuple(found.shape), dtype_name(found.dtype)
        if (shape, dtype) != (target.shape, target.dtype):  # the in-place one rounds to its dtype
            raise _Cut(launch.index)
        size_bytes = found.numel() * ITEM_BYTES[dtype]
        return Value(0, Role.ACTIVATION, shape, found.stride(), dtype, size_bytes, callee.name)

    def _new_value(self, like: Value) -> int:
        index = len(self._values)
        self._values.append(dataclasses.replace(like, index=index, role=Role.ACTIVATION))
        self._used_later.append(-1)
        return index

    def _launch(
        self,
        launch: Launch,
        callee: Callee,
        given: tuple[Argument, ...],
        results: tuple[TensorView | None, ...],
    ) -> Launch:
        changed = dataclasses.replace(launch, callee=callee, arguments=given, results=results)
        made = tuple(view.value for view in changed.made())
        reads = tuple(dict.fromkeys(view.value for view in changed.views()))
        return dataclasses.replace(changed, reads=reads, writes=made)


def _without_memory(argument: Argument) -> object:
    if isinstance(argument, TensorView):
        return torch.empty_strided(
            argument.shape, argument.strides, dtype=find_dtype(argument.dtype), device="meta"
        )
    if isinstance(argument, tuple):
        return [_without_memory(one) for one in argument]
    return symbol_object(argument, Bindings()) if isinstance(argument, Symbol) else argument


def _are_apart(one: TensorView, other: TensorView) -> bool:
    """Whether two views of a Value are disjoint; False if unknown."""
    if one.end_bytes <= other.offset_bytes or other.end_bytes <= one.offset_bytes:
        return True
    if (one.shape, one.strides, one.dtype) != (other.shape, other.strides, other.dtype):
        return False
    item_bytes = ITEM_BYTES[one.dtype]
    distance, rest = divmod(abs(one.offset_bytes - other.offset_bytes), item_bytes)
    steps = sorted(zip(one.strides, one.shape, strict=True), reverse=True)
    return not rest and not _reaches(distance, [(stride, size - 1) for stride, size in steps])


def _reaches(distance: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether a distance is a sum of strides, each up to its count, in either direction."""
    if not steps:
        return distance == 0
    (stride, most), rest = steps[0], steps[1:]
    if not stride or not most:
        return _reaches(distance, rest)
    reach = sum(stride * most for stride, most in rest)
    lowest = max(-most, -((reach - distance) // stride))
    highest = min(most, (distance + reach) // stride)
    return any(_reaches(distance - stride * n, rest) for n in range(lowest, highest + 1))

"""In-place operators as functional ones, where nobody else sees the memory that they write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from offload.compile.extraction import whole_view
from offload.errors import CaptureError
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
    same_strides,
)
from offload.torch_names import (
    dtype_name,
    find_dtype,
    find_overload,
    positional_and_named,
    symbol_object,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Functional:
    """Launches that write nothing but what they make.

    Attributes:
        end: behind the last of them; those behind could not be followed.
        program: as it was, with these in the place of the recorded ones, and with the Values that
            they make besides behind the others.
        used_later: by Value the launch that uses it last.
    """

    end: int
    program: Program
    used_later: Sequence[int]


def functional_name(launch: Launch) -> str:
    """The pointwise operator that gives what an in-place one writes; empty where there is none."""
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
    return functional if is_alike and torch.Tag.pointwise in found.tags else ""


def make_functional(
    program: Program, first: int, end: int, used_later: Sequence[int]
) -> Functional | None:
    """Follow in-place writes through launches in a row.

    A write is followed on a Value that is used by nobody behind these launches, or that they make
    and write as a whole; later launches read what was written, or parts beside it.

    Args:
        program: what they are of.
        first: the first launch.
        end: behind the last one.
        used_later: `extraction.last_uses` of the program.

    Returns:
        As many launches as can be followed; None where these are none.
    """
    while end > first:
        if not any(launch.results == (None,) for launch in program.launches[first:end]):
            return Functional(end, program, used_later)
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
    """Keeps for each Value that is written what it holds now."""

    def __init__(self, program: Program, first: int, end: int, used_later: Sequence[int]) -> None:
        self._program = program
        self._first, self._end = first, end
        self._values = list(program.values)
        self._used_later = list(used_later)
        self._launches: list[Launch] = []
        self._base: dict[int, int] = {}  # of a written Value: which one holds its whole content
        self._parts: dict[int, list[tuple[TensorView, int]]] = {}  # written since, apart
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
        return Functional(self._end, program, self._used_later)

    def _outliving(self) -> dict[int, int]:
        """By Value that others use later: which launch writes it last. These write all of it."""
        made: set[int] = set()
        last: dict[int, int] = {}
        for launch in self._program.launches[self._first : self._end]:
            made |= {view.value for view in launch.made()}
            if launch.results != (None,):
                continue
            (index,) = launch.writes
            if self._used_later[index] >= self._end:
                target = launch.arguments[0]
                if index not in made or target != whole_view(self._program.values[index]):
                    raise _Cut(last.get(index, launch.index))
                last[index] = launch.index
        return last

    def _made(self, launch: Launch) -> Launch:
        given = self._given(launch)
        results = [None if view is None else self._renamed(view) for view in launch.results]
        return self._launch(launch, launch.callee, given, tuple(results))

    def _renamed(self, view: TensorView) -> TensorView:
        """A result of a Value that will be written and outlives: its name is for the last write."""
        if view.value not in self._last_write:
            return view
        named = self._new_value(self._program.values[view.value])
        self._base[view.value] = named
        return dataclasses.replace(view, value=named)

    def _written(self, launch: Launch) -> Launch:
        target = launch.arguments[0]
        assert isinstance(target, TensorView)  # as functional_name found
        given = self._given(launch)
        callee = Operator(functional_name(launch))
        like = self._result_like(callee, given, launch)
        value = self._program.values[target.value]
        is_whole = target == whole_view(value) and same_strides(
            value.shape, like.strides, value.strides
        )
        if is_whole:
            like = dataclasses.replace(like, strides=value.strides)
        if self._last_write.get(target.value) == launch.index:
            if not is_whole:
                raise _Cut(launch.index)
            made = target.value
        else:
            made = self._new_value(like)
        if is_whole:
            self._base[target.value] = made
            self._parts.pop(target.value, None)
        else:
            if target.value in self._last_write:
                raise _Cut(launch.index)
            parts = self._parts.setdefault(target.value, [])
            parts[:] = [part for part in parts if part[0] != target]
            if not all(_are_apart(target, part) for part, _ in parts):
                raise _Cut(launch.index)
            parts.append((target, made))
        return self._launch(launch, callee, given, (whole_view(self._values[made]),))

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
                raise _Cut(launch.index)
        return dataclasses.replace(view, value=self._base.get(view.value, view.value))

    def _result_like(self, callee: Operator, given: tuple[Argument, ...], launch: Launch) -> Value:
        """A Value as the functional operator gives it, laid out as torch lays it out."""
        overload = find_overload(callee.name)
        arguments = [_without_memory(one) for one in given]
        positional, named = positional_and_named(overload, arguments)
        found = overload(*positional, **named)
        target = launch.arguments[0]
        assert isinstance(target, TensorView)
        shape, dtype = tuple(found.shape), dtype_name(found.dtype)
        if (shape, dtype) != (target.shape, target.dtype):  # the in-place one rounds to its own
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
    """Whether two views of a Value have no byte in common; False also where that is not known."""
    if one.end_bytes <= other.offset_bytes or other.end_bytes <= one.offset_bytes:
        return True
    if (one.shape, one.strides, one.dtype) != (other.shape, other.strides, other.dtype):
        return False
    item_bytes = ITEM_BYTES[one.dtype]
    distance, rest = divmod(abs(one.offset_bytes - other.offset_bytes), item_bytes)
    steps = sorted(zip(one.strides, one.shape, strict=True), reverse=True)
    return not rest and not _reaches(distance, [(stride, size - 1) for stride, size in steps])


def _reaches(distance: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether a distance is a sum of strides, each at most so many times, forth or back."""
    if not steps:
        return distance == 0
    (stride, most), rest = steps[0], steps[1:]
    if not stride or not most:
        return _reaches(distance, rest)
    reach = sum(stride * most for stride, most in rest)
    lowest = max(-most, -((reach - distance) // stride))
    highest = min(most, (distance + reach) // stride)
    return any(_reaches(distance - stride * n, rest) for n in range(lowest, highest + 1))

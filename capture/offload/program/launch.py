"""Launches: what is called, with which views, and what it touches."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offload.console.text import one_line
from offload.program.collectives import NAMESPACE, WAIT, group_name
from offload.program.values import Symbol, TensorView

if TYPE_CHECKING:
    from offload.program.program import Program

Argument = TensorView | Symbol | None | bool | int | float | complex | str | tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """A callee that is one overload of an operator that torch has registered.

    `name` is qualified: `aten::add.Tensor`, `aten::mm`.
    """

    name: str

    @property
    def is_aten(self) -> bool:
        """Whether it is torch's own, so that its schema says all that it does."""
        return self.name.startswith("aten::")


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A callee that is a recorded callable itself, whose launches could not be seen.

    Attributes:
        index: of the callable in `Bindings.callables`. It takes the tensors of the Program's
            inputs in order, and gives those of its results in order; it reads and writes weights
            where they are.
        reason: why the call is one launch, for people.
    """

    index: int
    reason: str

    @property
    def name(self) -> str:
        """What stands for an operator's name; torch has none of this one."""
        return "offload::opaque"


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A callee that is compiled code over addresses, in the place of launches that were recorded.

    Its launch is given whole Values, in the order of the inputs of `replaces`, and makes those of
    its results in order; Values of role scratch follow, which are its own. Behind the inputs it may
    be given Values of role derived, which its code reads in the place of weights.

    Attributes:
        index: of the function in `Bindings.kernels`.
        replaces: the launches that it stands for, as a Program by themselves.
        derives: it makes Values of role derived: it runs where a weight that it reads was written
            since, and not in other executions.
        packed: the positions of inputs that its code does not read, as it has what was derived of
            these weights; who proves it against what it replaces does.
    """

    index: int
    replaces: Program
    derives: bool = False
    packed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What it does, for people: the operators that it stands for, repeated ones counted."""
        names = [
            one.name.removeprefix("aten::").partition(".")[0] for one in self.replaces.launches
        ]
        counted = [
            f"{names.count(name)} {name}" if names.count(name) > 1 else name
            for name in dict.fromkeys(names)
        ]
        shown = counted[:_NAMED_OPERATORS]
        more = len(counted) - len(shown)
        kind = "derived" if self.derives else "fused"
        return f"offload::{kind}({', '.join(shown)}{f', {more} more' if more else ''})"


_NAMED_OPERATORS = 4

Callee = Operator | Opaque | Kernel


class EffectKind(enum.StrEnum):
    """What a launch touches besides bytes."""

    GENERATOR = "generator"  # its state moves
    GUARD = "guard"  # an execution may end here, before anything visible has changed
    UNSEEN = "unseen"  # anything at all
    GROUP = "group"  # its ranks must come in the same order


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Effect:
    """Something that launches touch besides bytes: those that touch the same keep their order.

    `name` tells effects of one kind apart: the generator's number in `Bindings.generators`, the
    group's name. Launches that wait for collectives touch the group without a name: they keep their
    order, and what they wait for they write.
    """

    kind: EffectKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        index: its position in `Program.launches`.
        callee: what is called.
        arguments: in schema order, defaults filled in; tensor lists as tuples. Of an opaque callee
            the Program's input views.
        results: for each thing that the callee returns, lists opened, in order, the view of the
            Value that it makes, or None where it returns no tensor, an argument, a view of one, or
            a tensor on the CPU that nobody uses and that is no host constant; empty where it
            returns nothing.
        reads, writes: the Values that it was observed to read and to write.
        random: it draws from a generator, so it is never removed, even if nobody reads it.
        guard: of a host read, the value that was read, which each execution must find again.
        guards_shape: its results' shapes depend on data and must come out as recorded.
        source: the user's `file:line`.
        ranges: the names of the profiler's ranges (`torch.profiler.record_function`) that the
            forward had open there, the outer ones first.
    """

    index: int
    callee: Callee
    arguments: tuple[Argument, ...]
    results: tuple[TensorView | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool
    guard: bool | int | float | complex | None
    guards_shape: bool
    source: str
    ranges: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is in the user's code, for people: its ranges and its line."""
        place = f"{'/'.join(self.ranges)} {self.source}" if self.ranges else self.source
        return one_line(place)

    @property
    def name(self) -> str:
        """What is called, for people."""
        return self.callee.name

    @property
    def is_collective(self) -> bool:
        """Whether it starts a collective, or waits for one."""
        return isinstance(self.callee, Operator) and self.callee.name.startswith(NAMESPACE)

    @property
    def waits(self) -> bool:
        """Whether it waits for a collective that an earlier launch started."""
        return self.callee.name == WAIT

    @property
    def effects(self) -> frozenset[Effect]:
        """What it touches besides the bytes of `reads` and `writes`."""
        found = set()
        if self.random:
            named = {one.name for one in self.symbols() if one.kind == "generator"}
            found |= {Effect(EffectKind.GENERATOR, one) for one in named or {"0"}}
        if self.guard is not None or self.guards_shape:
            found.add(Effect(EffectKind.GUARD))
        if isinstance(self.callee, Opaque):
            found.add(Effect(EffectKind.UNSEEN))
        elif isinstance(self.callee, Operator):
            if self.is_collective:
                found.add(Effect(EffectKind.GROUP, group_name(self.arguments)))
            elif not self.callee.is_aten:
                found.add(Effect(EffectKind.UNSEEN))
        return frozenset(found)

    def symbols(self) -> Iterator[Symbol]:
        """Every Symbol among the arguments, those in lists included."""
        return _symbols(self.arguments)

    def views(self) -> Iterator[TensorView]:
        """Every tensor argument, those in lists included."""
        for argument in self.arguments:
            if isinstance(argument, TensorView):
                yield argument
            elif isinstance(argument, tuple):
                yield from (item for item in argument if isinstance(item, TensorView))

    def touched(self) -> tuple[int, ...]:
        """Every Value that it names, also where it looks at shapes alone; some more than once."""
        return (*self.reads, *self.writes, *(view.value for view in self.views()))

    def made(self) -> Iterator[TensorView]:
        """The results that are new Values."""
        return (result for result in self.results if result is not None)

    def __str__(self) -> str:
        made = ", ".join(str(view) for view in self.made())
        written = set(self.writes) - {view.value for view in self.made()}
        left = made or ", ".join(f"write %{index}" for index in sorted(written)) or "-"
        arguments = ", ".join(_argument_text(argument) for argument in self.arguments)
        guard = f"  guard {self.guard!r}" if self.guard is not None else ""
        return f"{self.index:>4}: {left} = {self.name}({arguments}){guard}  # {self.place}"


def _symbols(arguments: tuple[Argument, ...]) -> Iterator[Symbol]:
    for argument in arguments:
        if isinstance(argument, Symbol):
            yield argument
        elif isinstance(argument, tuple):
            yield from _symbols(argument)


def _argument_text(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(_argument_text(item) for item in argument) + "]"
    return str(argument)

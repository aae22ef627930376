"""Launches: their callees, operands and effects."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offload.console.text import one_line
from offload.program.collectives import COPIED_AT_START, NAMESPACE, WAIT, group_name
from offload.program.triton_kernels import TritonKernel
from offload.program.values import Symbol, TensorView

if TYPE_CHECKING:
    from offload.program.program import Program

Argument = TensorView | Symbol | None | bool | int | float | complex | str | tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """A callee that is an operator overload registered with torch.

    `name` is qualified: `aten::add.Tensor`, `aten::mm`.
    """

    name: str

    @property
    def is_aten(self) -> bool:
        """Whether it is one of torch's operators, whose schema declares all that it does."""
        return self.name.startswith("aten::")


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A callee that is the recorded callable itself, whose launches could not be seen.

    Attributes:
        index: of the callable in `Bindings.callables`. It takes the tensors of the Program's inputs
            in order, and returns those of its results in order; it reads and writes weights in
            place.
        reason: why the call is a single launch, for messages.
    """

    index: int
    reason: str

    @property
    def name(self) -> str:
        """A name in place of an operator's; torch has no such operator."""
        return "offload::opaque"


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A callee that is compiled code over addresses, which replaces recorded launches.

    Its launch takes whole Values, in the order of the inputs of `replaces`, and makes those of its
    results in order; then Values of role scratch, its temporary memory. Behind the inputs it may
    take Values of role derived, which its code reads in place of weights.

    Attributes:
        index: of the function in `Bindings.kernels`.
        replaces: the launches that it replaces, as a Program.
        derives: it makes Values of role derived: it runs only in executions before which a weight
            that it reads was written.
        packed: the positions of inputs that its code does not read, as it reads what was derived
            from these weights; its proof against the replaced launches reads them.
    """

    index: int
    replaces: Program
    derives: bool = False
    packed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The operators that it replaces, repeated ones counted, for messages."""
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

Callee = Operator | Opaque | Kernel | TritonKernel


class EffectKind(enum.StrEnum):
    """What a launch touches besides bytes."""

    GENERATOR = "generator"  # its state advances
    GUARD = "guard"  # an execution may end here, before any visible change
    UNSEEN = "unseen"  # anything at all
    GROUP = "group"  # its ranks must start in the same order


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Effect:
    """Something that launches touch besides bytes: launches with the same effect keep their order.

    `name` distinguishes effects of one kind: the generator's number in `Bindings.generators`, the
    group's name. Launches that wait for collectives touch the group without a name: they keep their
    order, and write what they wait for.
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
        callee: what it calls.
        arguments: in schema order, defaults filled in; tensor lists as tuples. For an opaque
            callee, the Program's input views; for a Triton kernel, its `parameters`.
        results: for each object that the callee returns (lists flattened), in order, the view of
            the Value that it makes. None for an object that is not a tensor, for an argument, a
            view of an argument, and an unused tensor on the CPU that is not a host constant. Empty
            if nothing is returned.
        reads, writes: the Values that it was observed to read and write.
        random: it draws from a generator, so it is never removed, even if its results are unused.
        guard: for a host read, the recorded value, which each execution must read again.
        guards_shape: the shapes of its results depend on data and must equal the recorded ones.
        source: the user's `file:line`.
        ranges: the names of the profiler ranges (`torch.profiler.record_function`) that were open
            there, outermost first.
        backward_pass: the number of the backward pass (a call of autograd's engine, such as
            `loss.backward()`) that launched it, from 0 in recorded order; None: no pass did. Not in
            files, which hold no training steps.
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
    backward_pass: int | None = dataclasses.field(default=None, compare=False)

    @property
    def place(self) -> str:
        """Its place in the user's code, for messages: its ranges and its line."""
        place = f"{'/'.join(self.ranges)} {self.source}" if self.ranges else self.source
        return one_line(place)

    @property
    def name(self) -> str:
        """The name of its callee, for messages."""
        return self.callee.name

    @property
    def is_collective(self) -> bool:
        """Whether it starts or awaits a collective."""
        return isinstance(self.callee, Operator) and self.callee.name.startswith(NAMESPACE)

    @property
    def waits(self) -> bool:
        """Whether it awaits a collective that an earlier launch started."""
        return self.callee.name == WAIT

    @property
    def effects(self) -> frozenset[Effect]:
        """Its effects besides the bytes of `reads` and `writes`."""
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
        """Every Symbol among the arguments, including those in lists."""
        return _symbols(self.arguments)

    def views(self) -> Iterator[TensorView]:
        """Every tensor argument, including those in lists."""
        for argument in self.arguments:
            if isinstance(argument, TensorView):
                yield argument
            elif isinstance(argument, tuple):
                yield from (item for item in argument if isinstance(item, TensorView))

    def touched(self) -> tuple[int, ...]:
        """Every Value that it names, including those of which only shapes are read; may repeat."""
        return (*self.reads, *self.writes, *(view.value for view in self.views()))

    def held(self) -> frozenset[int]:
        """The Values that a collective, if this launch starts one, uses until its wait."""
        sent = () if self.name in COPIED_AT_START else self.reads
        return frozenset((*sent, *self.writes))

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

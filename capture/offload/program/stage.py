"""Stages: some launches of a Program in a row, and the messages that carry what they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.errors import ProgramError
from offload.program.bindings import Bindings, BoundProgram
from offload.program.check import check_program
from offload.program.collectives import Group
from offload.program.launch import Launch
from offload.program.messages import (
    await_received,
    await_sent,
    being_sent,
    check_sendable,
    reached_bytes,
    start_receiving,
    start_sending,
)
from offload.program.program import Program
from offload.program.rewrite import renumbered
from offload.program.structure import Structure
from offload.program.values import MADE_ROLES, Role, TensorView, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A Value that one stage sends to a later one.

    Attributes:
        value: of the whole Program.
        sender, receiver: stages.
        tag: distinguishes messages between the same two stages.
    """

    value: int
    sender: int
    receiver: int
    tag: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage as a Program by itself.

    Attributes:
        bound: the first stage is called as the whole Program is, the last one gives what that does;
            others take no arguments, and give none. Weights are those that its launches use.
        messages: that it receives and sends.
    """

    bound: BoundProgram
    messages: tuple[Message, ...]


def check_stageable(program: Program) -> None:
    """Check that a Program may be executed in stages on several ranks.

    Raises:
        ProgramError: it is one opaque launch, has collectives, writes inputs or weights, has
            effects (random numbers, guards, unseen work), or returns an input or a weight; the
            message says which.
    """
    why = ""
    if program.opaque is not None:
        why = f"it is one launch, which cannot be divided: {program.opaque.reason}"
    elif program.groups:
        why = "it has collectives already"
    for launch in program.launches:
        if launch.effects and not why:
            kinds = {"generator": "draws random numbers", "guard": "may end the execution"}
            does = kinds.get(min(launch.effects).kind, "may have unseen effects")
            why = f"{launch.source}: {launch.name} {does}, which other ranks would not notice"
    if program.leaves_something and not why:
        why = "it writes inputs or weights, as a training step does"
    elif program.overlaps and not why:
        why = "inputs share memory, and ranks do not"
    for result in program.results:
        if program.values[result.view.value].role not in MADE_ROLES and not why:
            why = f"it returns {program.values[result.view.value].name}, which no launch makes"
    if why:
        raise ProgramError(f"the program cannot be executed in stages: {why}")


def messages_of(program: Program, stages: Sequence[Sequence[int]]) -> tuple[Message, ...]:
    """What stages send to later ones: what these read, or in the last one what callers see.

    Args:
        program: that passes `check_stageable`.
        stages: the launches of each, in recorded order; the first stage has the inputs.
    """
    stage_of = {launch: stage for stage, launches in enumerate(stages) for launch in launches}
    makers = {view.value: 0 for view in program.inputs}
    readers: dict[int, set[int]] = {}
    for launch in program.launches:
        stage = stage_of[launch.index]
        for value in launch.touched():
            if program.values[value].role is not Role.WEIGHT:
                makers.setdefault(value, stage)
                readers.setdefault(value, set()).add(stage)
    for result in program.results:
        readers.setdefault(result.view.value, set()).add(len(stages) - 1)
    pairs = [
        (value, makers[value], reader)
        for value in sorted(readers)
        for reader in sorted(readers[value])
        if reader != makers[value]
    ]
    return tuple(Message(*pair, tag) for tag, pair in enumerate(pairs))


def stage_program(
    bound: BoundProgram, stages: Sequence[Sequence[int]], number: int, group: Group | None
) -> Stage:
    """Make one stage of a Program, with the messages that it receives and sends.

    Args:
        bound: the whole Program, which passes `check_stageable`.
        stages: the launches of each stage in recorded order. A Value that is written more than once
            is made and written within one.
        number: of the stage, which is that of its rank in the group.
        group: whose ranks have the stages; None: there is one stage.

    Raises:
        ProgramError: a stage reads or writes what is not a whole tensor of another one.
    """
    program = bound.program
    own = tuple(one for one in messages_of(program, stages) if number in (one.sender, one.receiver))
    reached = reached_bytes(program)
    for one in own:
        check_sendable(program.values[one.value], reached.get(one.value, 0))
    made = _StageLaunches(program, group, number)
    made.add_received([one for one in own if one.receiver == number])
    for index in stages[number]:
        made.add(program.launches[index])
    made.add_sent([one for one in own if one.sender == number])
    staged, positions = made.program(is_last=number == len(stages) - 1)
    check_program(staged)
    bindings = rank_bindings(
        bound, staged, positions, is_first=number == 0, is_last=number == len(stages) - 1
    )
    return Stage(BoundProgram(staged, bindings), own)


class _StageLaunches:
    """The launches of one stage as they are added, over Values of the whole Program."""

    def __init__(self, program: Program, group: Group | None, number: int) -> None:
        self._whole = program
        self._group = group
        self._number = number
        self._launches: list[Launch] = []
        self._values = list(program.values)

    def add(self, launch: Launch) -> None:
        self._launches.append(launch)

    def add_received(self, messages: Sequence[Message]) -> None:
        """Receive all, and wait for all."""
        for one in messages:
            value = self._whole.values[one.value]
            self.add(
                start_receiving(value, one.sender, one.tag, group=self._peers, place=self._place)
            )
        for one in messages:
            self.add(await_received(self._whole.values[one.value], self._place))

    def add_sent(self, messages: Sequence[Message]) -> None:
        """Send all, and wait for all; a Value of no bytes stands for a message being sent."""
        sent = []
        for one in messages:
            value = self._whole.values[one.value]
            token = being_sent(value, len(self._values), one.tag)
            sent.append((value, token))
            self._values.append(token)
            self.add(
                start_sending(
                    value, token, one.receiver, one.tag, group=self._peers, place=self._place
                )
            )
        for value, token in sent:
            self.add(await_sent(value, token, self._place))

    def program(self, *, is_last: bool) -> tuple[Program, Mapping[int, int]]:
        """The stage, and by Value of the whole Program its index there."""
        whole, is_first = self._whole, self._number == 0
        used = {value for launch in self._launches for value in launch.touched()}
        if is_first:
            used |= {view.value for view in whole.inputs}
        if is_last:
            used |= {result.view.value for result in whole.results}
        kept = [value for value in self._values if value.index in used]
        positions = {value.index: position for position, value in enumerate(kept)}
        staged = rank_program(
            whole,
            [
                dataclasses.replace(
                    one, index=at, role=self._role(one, is_first=is_first, is_last=is_last)
                )
                for at, one in enumerate(kept)
            ],
            [renumbered(one, at, positions) for at, one in enumerate(self._launches)],
            positions,
            self._group,
            given=whole.inputs if is_first else None,
            returned=positions if is_last else None,
        )
        return staged, positions

    @property
    def _peers(self) -> Group:
        assert self._group is not None  # several stages have one
        return self._group

    @property
    def _place(self) -> str:
        return f"stage {self._number}"

    def _role(self, value: Value, *, is_first: bool, is_last: bool) -> Role:
        if value.role is Role.INPUT and not is_first:
            return Role.ACTIVATION
        if value.role is Role.OUTPUT and not is_last:
            return Role.ACTIVATION
        return value.role


def rank_program(
    whole: Program,
    values: Sequence[Value],
    launches: Sequence[Launch],
    positions: Mapping[int, int],
    group: Group | None,
    *,
    given: Sequence[TensorView] | None,
    returned: Mapping[int, int] | None,
) -> Program:
    """A rank's part of a Program as a Program, unchecked.

    Args:
        whole: the Program of all ranks.
        values: the rank's Values, with their roles there.
        launches: over these Values.
        positions: by Value of the whole Program that is an input or a weight there, its index.
        group: whose ranks exchange messages; None: there is one rank.
        given: the inputs of the whole Program; None: the part takes no arguments.
        returned: by Value of a result its index; None: the part returns nothing.
    """
    nothing = Structure("tuple", (), type_name="builtins.tuple", container=tuple)
    no_keywords = Structure("dict", type_name="builtins.dict", container=dict)
    is_first, is_last = given is not None, returned is not None
    has_messages = any(one.is_collective for one in launches)
    return dataclasses.replace(
        whole,
        values=tuple(values),
        launches=tuple(launches),
        inputs=tuple(_at(view, positions) for view in given or ()),
        results=()
        if returned is None
        else tuple(dataclasses.replace(one, view=_at(one.view, returned)) for one in whole.results),
        arguments_structure=whole.arguments_structure
        if is_first
        else Structure("tuple", (nothing, no_keywords)),
        result_structure=whole.result_structure if is_last else nothing,
        weight_views={
            positions[index]: tuple(_at(view, positions) for view in views)
            for index, views in whole.weight_views.items()
            if index in positions
        },
        parameter_names=whole.parameter_names if is_first else (),
        keyword_only_names=whole.keyword_only_names if is_first else (),
        host_reads=(),
        groups=(group,) if has_messages and group is not None else (),
    )


def _at(view: TensorView, positions: Mapping[int, int]) -> TensorView:
    return dataclasses.replace(view, value=positions[view.value])


def rank_bindings(
    bound: BoundProgram,
    staged: Program,
    positions: Mapping[int, int],
    *,
    is_first: bool,
    is_last: bool,
) -> Bindings:
    """The objects of a rank's part of a Program: of weights those that it uses.

    Args:
        bound: the whole Program.
        staged: the part, as from `rank_program`.
        positions: as there.
        is_first: the part takes the arguments.
        is_last: the part returns the results.
    """
    moved = bound.bindings.moved(positions)
    weights = {value.index for value in staged.of_role(Role.WEIGHT)}
    return dataclasses.replace(
        moved,
        weights={index: one for index, one in moved.weights.items() if index in weights},
        stored={index: one for index, one in moved.stored.items() if index in weights},
        input_samples=moved.input_samples if is_first else (),
        arguments=moved.arguments if is_first else None,
        results=moved.results if is_last else None,
    )

"""The parts of a training step: its forward and backward passes by micro-batch, and the update.

A step that accumulates gradients has one backward pass for each micro-batch. The recording says
which launches belong to which pass (`Launch.backward_pass`); what a pass needs of the other
launches is its forward pass.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Sequence

from offload.errors import ProgramError
from offload.program.launch import EffectKind, Launch
from offload.program.per_tensor import n_tensors, of_tensors, one_by_one
from offload.program.program import Program
from offload.program.step_draws import (
    GET_STATE,
    SET_STATE,
    drawn_by_shape,
    refuse_draws,
    with_generator_states,
)
from offload.program.values import MADE_ROLES, Role


class Phase(enum.StrEnum):
    """What a launch of a training step is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # what no backward pass needs: the optimizer's launches


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A launch of a training step, or what it does for one index of its lists of tensors.

    Attributes:
        launch: its `index` is that of the recorded launch.
        tensor: the index; None: the launch is not divided.
        phase: what it is for.
        micro_batch: of a forward or backward pass; of the update the number of micro-batches.
        is_shared: it computes from what is equal on all ranks (constants, step counters, random
            numbers), so that each rank that needs its results can run it; or it sets a generator.
    """

    launch: Launch
    tensor: int | None
    phase: Phase
    micro_batch: int
    is_shared: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepParts:
    """A training step in parts.

    Attributes:
        program: the step, without operands that launches take and do not read, behind launches that
            give all ranks the first rank's generators (`with_generator_states`), and with launches
            for each tensor in place of some (`one_by_one`).
        recorded: by launch of `program` the index of the recorded launch; None: it was added.
        parts: in recorded order.
        n_micro_batches: the number of backward passes.
        shared: Values that are equal on all ranks: constants, weights that nothing writes,
            and what shared parts write.
    """

    program: Program
    recorded: tuple[int | None, ...]
    parts: tuple[Part, ...]
    n_micro_batches: int
    shared: frozenset[int]


def step_parts(program: Program) -> StepParts:
    """Divide a training step into parts that may be on several ranks.

    Raises:
        ProgramError: it is not a step with a backward pass, or has what ranks cannot do apart: one
            opaque launch, collectives, random numbers beside what other ranks compute, unseen work,
            a guard of what other ranks compute or of random numbers, inputs that share memory or
            are written, or a result that no launch makes; the message names the launch.
    """
    _refuse(program)
    program, recorded = _in_a_row(_without_unread(program))
    n_recorded = len(program.launches)
    program = with_generator_states(program)
    recorded = (*(None,) * (len(program.launches) - n_recorded), *recorded)
    divided = [
        (one, at if n > 1 else None)
        for launch in program.launches
        for n in (n_tensors(launch),)
        for at, one in enumerate(
            [of_tensors(launch, (at,)) for at in range(n)] if n > 1 else [launch]
        )
    ]
    launches = [one for one, _ in divided]
    shared_launches, shared = _shared(program, launches)
    refuse_draws(launches, shared_launches)
    shared_launches |= {at for at, one in enumerate(launches) if one.name == SET_STATE}
    _refuse_between(program, launches)
    passes, n_passes = _backward_passes(launches)
    needed = _needed(launches, passes)[0]
    parts: list[Part] = []
    made_by: dict[int, int] = {}  # by Value, the last micro-batch whose part wrote it
    begun = 0
    for at, (launch, tensor) in enumerate(divided):
        number = passes[at]
        if number is not None:
            phase, micro_batch = Phase.BACKWARD, number
            begun = max(begun, number + 1)
        elif needed[at] is not None:
            phase, micro_batch = Phase.FORWARD, needed[at] or 0
        elif begun < n_passes:  # between passes, as a sum of losses
            of = [made_by[value] for value in launch.touched() if value in made_by]
            phase, micro_batch = Phase.FORWARD, max(of, default=begun)
        else:
            phase, micro_batch = Phase.UPDATE, n_passes
        made_by.update(dict.fromkeys(launch.writes, micro_batch))
        parts.append(Part(launch, tensor, phase, micro_batch, at in shared_launches))
    _refuse_guards(parts)
    return StepParts(program, recorded, tuple(parts), n_passes, shared)


def _refuse(program: Program) -> None:
    why = ""
    if program.opaque is not None:
        why = f"it is one launch, which cannot be divided: {program.opaque.reason}"
    elif program.groups:
        why = "it has collectives already"
    elif program.overlaps:
        why = "inputs share memory, and ranks do not"
    elif all(launch.backward_pass is None for launch in program.launches):
        why = "it writes inputs or weights, and has no backward pass"
    inputs = {view.value for view in program.inputs}
    for launch in program.launches:
        where = f"{launch.place}: {launch.name}"
        if not why and any(one.kind is EffectKind.UNSEEN for one in launch.effects):
            why = f"{where} is not one of torch's operators, and may have unseen effects"
        if inputs.intersection(launch.writes) and not why:
            value = min(inputs.intersection(launch.writes))
            why = f"{where} writes the input %{value} ({program.values[value].name})"
    for result in program.results:
        if program.values[result.view.value].role not in MADE_ROLES and not why:
            why = f"it returns {program.values[result.view.value].name}, which no launch makes"
    if why:
        raise ProgramError(f"the training step cannot be executed in stages: {why}")


def _refuse_between(program: Program, launches: Sequence[Launch]) -> None:
    """Refuse writes of weights by which one micro-batch depends on another one's backward pass."""
    passes = [launch.backward_pass for launch in launches]
    needed, _ = _needed(launches, passes)
    written: set[int] = set()  # by backward passes
    for launch, number, first in zip(launches, passes, needed, strict=True):
        if number is not None:
            written.update(launch.writes)
            continue
        kept = [value for value in launch.writes if is_weight(program, value)]
        if kept and first is not None and not written.isdisjoint(launch.touched()):
            raise ProgramError(
                f"the training step cannot be executed in stages: {launch.place}: {launch.name} "
                f"writes %{kept[0]} ({program.values[kept[0]].name}) between backward passes, from "
                "what one of them computed, so that no micro-batches could overlap: let the "
                "optimizer step once, behind all backward passes"
            )


def _without_unread(program: Program) -> Program:
    """The Program without operands that launches take and do not read.

    These are tensors that give random numbers their shape (`drawn_by_shape`), and running
    statistics of batch normalization. Where it trains, its backward pass takes the saved mean and
    deviation instead (`batch_norm_backward_cpu_template` in
    aten/src/ATen/native/Normalization.cpp). Otherwise the next micro-batch could not write the
    statistics before the backward pass.
    """
    launches = []
    for launch in program.launches:
        if launch.name == "aten::native_batch_norm_backward" and launch.arguments[7] is True:
            arguments = (*launch.arguments[:3], None, None, *launch.arguments[5:])
            changed = dataclasses.replace(launch, arguments=arguments)
            named = {view.value for view in changed.views()}
            reads = tuple(value for value in launch.reads if value in named)
            launches.append(dataclasses.replace(changed, reads=reads))
        else:
            launches.append(drawn_by_shape(launch))
    return dataclasses.replace(program, launches=tuple(launches))


def _in_a_row(program: Program) -> tuple[Program, tuple[int | None, ...]]:
    """The Program with launches one by one (`one_by_one`), and by launch its recorded index."""
    rows = [(one, launch.index) for launch in program.launches for one in one_by_one(launch)]
    launches = tuple(
        one if one.index == at else dataclasses.replace(one, index=at)
        for at, (one, _) in enumerate(rows)
    )
    return dataclasses.replace(program, launches=launches), tuple(index for _, index in rows)


def _refuse_guards(parts: Sequence[Part]) -> None:
    for part in parts:
        if not part.is_shared and any(e.kind is EffectKind.GUARD for e in part.launch.effects):
            raise ProgramError(
                f"the training step cannot be executed in stages: {part.launch.place}: "
                f"{part.launch.name} may end the execution, of which other ranks would not know"
            )


def _shared(program: Program, launches: Sequence[Launch]) -> tuple[set[int], frozenset[int]]:
    """The positions of shared launches, and all shared Values."""
    own = {view.value for view in program.inputs} | {one.view.value for one in program.results}
    own |= {value for one in launches if one.name == GET_STATE for value in one.writes}
    alone: set[int] = set()
    n_before = -1
    while len(alone) + len(own) != n_before:
        n_before = len(alone) + len(own)
        for at, launch in enumerate(launches):
            if at in alone or not own.isdisjoint(launch.touched()):
                alone.add(at)
                own.update(launch.writes)
    values = frozenset(one.index for one in program.values if one.index not in own)
    return set(range(len(launches))) - alone, values


def _backward_passes(launches: Sequence[Launch]) -> tuple[list[int | None], int]:
    """By launch the number of its backward pass, without passes that belong to a forward pass.

    These are passes whose results other launches use before a later pass (as gradient penalties).
    """
    passes = [launch.backward_pass for launch in launches]
    while True:
        _, inner = _needed(launches, passes)
        if not inner:
            break
        passes = [None if one in inner else one for one in passes]
    numbers = {one: at for at, one in enumerate(sorted({one for one in passes if one is not None}))}
    return [None if one is None else numbers[one] for one in passes], len(numbers)


def _needed(
    launches: Sequence[Launch], passes: Sequence[int | None]
) -> tuple[list[int | None], set[int]]:
    """For each launch outside passes, the first pass that needs it.

    Returns:
        These by launch, None where no pass needs it; and the passes that such launches need.
    """
    first: dict[int, int] = {}  # by Value, the first pass behind this place that needs it
    found: list[int | None] = [None] * len(launches)
    for at in reversed(range(len(launches))):
        launch, number = launches[at], passes[at]
        if number is None:
            number = min((first[one] for one in launch.writes if one in first), default=None)
            found[at] = number
        if number is not None:
            for value in launch.touched():
                first[value] = min(number, first.get(value, number))
    written: dict[int, set[int]] = defaultdict(set)  # by Value, the passes that wrote it so far
    inner: set[int] = set()
    for at, launch in enumerate(launches):
        number = passes[at]
        if number is not None:
            for value in launch.writes:
                written[value].add(number)
        elif found[at] is not None:
            inner.update(*(written[value] for value in launch.touched() if value in written))
    return found, inner


def is_weight(program: Program, value: int) -> bool:
    """Whether a Value is memory of the caller that stays from step to step."""
    return program.values[value].role is Role.WEIGHT

"""A rank's part of a training step as a Program."""

from __future__ import annotations

import dataclasses

from offload.plan.rank_orders import Exchange, RankOrder, Work, starts_as
from offload.program import BoundProgram, Role, check_program, renumbered
from offload.program.collectives import Group
from offload.program.launch import Launch
from offload.program.messages import (
    await_received,
    await_sent,
    being_sent,
    check_sendable,
    message_bytes,
    reached_bytes,
    start_receiving,
    start_sending,
)
from offload.program.stage import rank_bindings, rank_program
from offload.program.values import Value


def training_rank(
    bound: BoundProgram, order: RankOrder, number: int, n_stages: int, group: Group | None
) -> BoundProgram:
    """Make a rank's part of a training step.

    Args:
        bound: the whole step.
        order: the rank's, which passes `check_rank_orders`.
        number: of its stage, which is that of the rank in the group.
        n_stages: the number of ranks.
        group: whose ranks have the stages; None: there is one.

    Raises:
        ProgramError: a Value that is sent is not a whole tensor.
    """
    is_first, is_last = number == 0, number == n_stages - 1
    made = _Part(bound, order, group, f"stage {number}", is_first=is_first)
    launches = made.launches()
    whole = bound.program
    staged = rank_program(
        whole,
        made.values,
        [dataclasses.replace(one, index=at) for at, one in enumerate(launches)],
        made.positions,
        group,
        given=whole.inputs if is_first else None,
        returned={value: made.local[one] for value, one in order.results.items()}
        if is_last
        else None,
    )
    check_program(staged)
    bindings = rank_bindings(bound, staged, made.positions, is_first=is_first, is_last=is_last)
    return BoundProgram(staged, bindings)


class _Part:
    """The Values and launches of one rank as they are made. Owner: one call.

    Attributes:
        values: of the part.
        local: by holding its Value's index; -1: nothing uses it.
        positions: by input or weight of the whole Program its index here.
    """

    def __init__(
        self,
        bound: BoundProgram,
        order: RankOrder,
        group: Group | None,
        place: str,
        *,
        is_first: bool,
    ) -> None:
        self._whole, self._order, self._group, self._place = bound.program, order, group, place
        self.values: list[Value] = []
        self.local: list[int] = []
        self.positions: dict[int, int] = {}
        self._sent: dict[int, Value] = {}  # by tag
        self._reached = reached_bytes(self._whole)
        returned = set(order.results.values())
        for at, holding in enumerate(order.holdings):
            role = starts_as(self._whole, holding, is_first=is_first)
            if role in (Role.INPUT, Role.WEIGHT):
                self.positions[holding.value] = len(self.values)
            self._add(holding.value, Role.OUTPUT if at in returned else role)
            if holding.message is not None:
                size_bytes = message_bytes(self.values[-1])
                self.values[-1] = dataclasses.replace(self.values[-1], size_bytes=size_bytes)
        for view in self._whole.inputs if is_first else ():
            if view.value not in self.positions:
                self.positions[view.value] = len(self.values)
                self._add(view.value, Role.INPUT)

    def _add(self, value: int, role: Role) -> None:
        index = len(self.values)
        self.local.append(index)
        self.values.append(dataclasses.replace(self._whole.values[value], index=index, role=role))

    def launches(self) -> list[Launch]:
        """Its launches, starts and waits of messages among them."""
        found = []
        for step in self._order.steps:
            if isinstance(step, Work):
                operands = {value: self.local[one] for value, one in step.operands.items()}
                found.append(renumbered(step.launch, 0, operands))
            else:
                found.append(self._exchange(step))
        return found

    def _exchange(self, step: Exchange) -> Launch:
        message, value = step.message, self.values[self.local[step.holding]]
        check_sendable(self._whole.values[message.value], self._reached.get(message.value, 0))
        assert self._group is not None  # several stages have one
        if not step.sends:
            if step.waits:
                return await_received(value, self._place)
            return start_receiving(
                value, message.sender, message.tag, group=self._group, place=self._place
            )
        if step.waits:
            return await_sent(value, self._sent[message.tag], self._place)
        sent = self._sent[message.tag] = being_sent(value, len(self.values), message.tag)
        self.values.append(sent)
        return start_sending(
            value, sent, message.receiver, message.tag, group=self._group, place=self._place
        )

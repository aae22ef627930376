"""Waits of senders, in the orders of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.rank_orders import Exchange, RankOrder, RankStep, Work


def await_sends(orders: Sequence[RankOrder]) -> tuple[RankOrder, ...]:
    """Let each sender wait for its messages.

    A sender waits as soon as something that it has received shows that the receiver has started to
    receive, so that the wait does not block; and at the latest before it writes what it sends, and
    at the end. Until then the memory of the message stays.

    Raises:
        PlanError: ranks wait for one another; the message names what one of them waits for.
    """
    return tuple(
        dataclasses.replace(order, steps=tuple(steps))
        for order, steps in zip(orders, _Awaiting(orders).found(), strict=True)
    )


class _Awaiting:
    """A simulation of the orders in which starts do not block. Owner: one call."""

    def __init__(self, orders: Sequence[RankOrder]) -> None:
        self._orders = orders
        n_ranks = len(orders)
        # By rank, how many steps of each rank are known there to have been taken.
        self._known = [[0] * n_ranks for _ in orders]
        self._known_at_send: dict[int, list[int]] = {}  # by tag
        self._received_at = {
            step.message.tag: at
            for order in orders
            for at, step in enumerate(order.steps)
            if isinstance(step, Exchange) and not step.sends and not step.waits
        }
        self._open: list[list[Exchange]] = [[] for _ in orders]
        self._steps: list[list[RankStep]] = [[] for _ in orders]

    def found(self) -> list[list[RankStep]]:
        """The steps of each rank."""
        ranks = range(len(self._orders))
        while sum([self._go_on(rank) for rank in ranks]):
            pass
        for rank in ranks:
            at = self._known[rank][rank]
            if at < len(self._orders[rank].steps):
                raise PlanError(
                    f"rank {rank} waits forever for {_step_text(self._orders[rank].steps[at])}"
                )
            self._await(rank, self._open[rank])
        return self._steps

    def _go_on(self, rank: int) -> bool:
        """Take the steps of a rank until one blocks; returns whether one was taken."""
        known, steps = self._known[rank], self._orders[rank].steps
        begin = known[rank]
        while known[rank] < len(steps):
            step = steps[known[rank]]
            if isinstance(step, Work):
                written = {step.operands[value] for value in step.launch.writes}
                self._await(rank, [one for one in self._open[rank] if one.holding in written])
                self._steps[rank].append(step)
            elif step.waits:
                sent = self._known_at_send.get(step.message.tag)
                if sent is None:
                    break
                self._steps[rank].append(step)
                known[:] = map(max, known, sent)
                self._await(rank, [one for one in self._open[rank] if self._is_received(rank, one)])
            else:
                self._steps[rank].append(step)
                if step.sends:
                    self._known_at_send[step.message.tag] = [*known]
                    self._open[rank].append(step)
            known[rank] += 1
        return known[rank] > begin

    def _is_received(self, rank: int, sent: Exchange) -> bool:
        """Whether a rank knows that a receiver has started to receive what it sent."""
        message = sent.message
        return self._known[rank][message.receiver] > self._received_at[message.tag]

    def _await(self, rank: int, sent: Sequence[Exchange]) -> None:
        ended = {one.message.tag for one in sent}
        self._steps[rank] += [dataclasses.replace(one, waits=True) for one in sent]
        self._open[rank] = [one for one in self._open[rank] if one.message.tag not in ended]


def _step_text(step: RankStep) -> str:
    assert isinstance(step, Exchange)
    message = step.message
    return f"%{message.value} (version {message.version}) of rank {message.sender}"

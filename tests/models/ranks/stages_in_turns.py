"""Stages of a training step that take turns in one process, on separate memory."""

from __future__ import annotations

import dataclasses

import torch

import offload
from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.interpreter.own_generators import drawing_alone
from offload.plan.rank_programs import training_rank
from offload.plan.schedules import Schedule
from offload.plan.topology import Link
from offload.plan.training_stages import TrainingStages, cut_training
from offload.program import BoundProgram, Group, Launch

Contents = dict[int, torch.Tensor]
"""The bytes of weights, by their Values in the whole step."""


class Rank:
    """A stage, its memory and generators, and how far it has come."""

    def __init__(self, bound: BoundProgram, weights: dict[int, torch.UntypedStorage]) -> None:
        alone = drawing_alone(bound)
        assert all(not one.name.startswith("aten::") for one in alone.others)
        self.bound = bound = alone.bound
        self.weights = weights  # by Value of the stage
        self.run = EagerRun(bound, {}, None)
        self.at = 0

    def begin(self, inputs: list[torch.UntypedStorage]) -> None:
        given = zip((view.value for view in self.bound.program.inputs), inputs, strict=False)
        bases = {value: (storage, 0) for value, storage in [*self.weights.items(), *given]}
        self.run, self.at = EagerRun(self.bound, bases, 0xFF), 0

    def seed(self, seed: int) -> None:
        for at, one in enumerate(self.bound.bindings.generators):
            one.manual_seed(seed + at)

    def generator_states(self) -> list[torch.Tensor]:
        return [one.get_state() for one in self.bound.bindings.generators]

    def result(self, number: int) -> torch.Tensor:
        return self.run.tensor(self.bound.program.results[number].view).clone()


@dataclasses.dataclass
class Message:
    """A message that one or both ends have started."""

    content: torch.Tensor | None = None
    receiver_started: bool = False


class StagesInTurns:
    """All stages of a step. A message is copied only when its receiver waits for it.

    So memory that is overwritten too early, or not yet written, shows in the results.
    """

    def __init__(
        self, captured: offload.Captured, n_stages: int, schedule: Schedule, launch_ns: list[float]
    ) -> None:
        bound = captured.bound
        link = Link(bytes_per_second=1e9, overhead_ns=500.0)
        self.stages: TrainingStages = cut_training(
            bound.program, launch_ns, link, n_stages, schedule=schedule
        )
        self.ranks = []
        bound = BoundProgram(self.stages.program, bound.bindings)
        self._values: list[dict[int, int]] = []  # by rank: weights of the step by the stage's
        for number, order in enumerate(self.stages.orders):
            group = Group("0", tuple(range(n_stages)), number, n_stages)
            part = training_rank(bound, order, number, n_stages, group if n_stages > 1 else None)
            holders = {id(held[0]): value for value, held in bound.bindings.weights.items()}
            values = {value: holders[id(held[0])] for value, held in part.bindings.weights.items()}
            weights = {
                value: held[0].untyped_storage().clone()
                for value, held in part.bindings.weights.items()
            }
            self._values.append(values)
            self.ranks.append(Rank(part, weights))

    def __call__(self, inputs: list[torch.UntypedStorage]) -> list[torch.Tensor]:
        """Run a step; returns its results.

        Raises:
            AssertionError: ranks wait for one another.
        """
        messages: dict[int, Message] = {}
        for number, rank in enumerate(self.ranks):
            rank.begin(inputs if number == 0 else [])
        while any(rank.at < len(rank.bound.program.launches) for rank in self.ranks):
            assert sum([self._go_on(rank, messages) for rank in self.ranks])
        last = self.ranks[-1]
        return [last.result(at) for at in range(len(last.bound.program.results))]

    def contents(self) -> Contents:
        """What each keeper holds."""
        return {
            self._values[stage][value]: bytes_of(storage)
            for stage, rank in enumerate(self.ranks)
            for value, storage in rank.weights.items()
            if self.stages.keepers.get(self._values[stage][value]) == stage
        }

    def _go_on(self, rank: Rank, messages: dict[int, Message]) -> bool:
        begin, launches = rank.at, rank.bound.program.launches
        while rank.at < len(launches) and self._step(rank, launches[rank.at], messages):
            rank.at += 1
        return rank.at > begin

    def _step(self, rank: Rank, launch: Launch, messages: dict[int, Message]) -> bool:
        if not launch.is_collective:
            outcome = rank.run.call(launch)()
            if launch.guard is not None:
                assert outcome == launch.guard
            rank.run.keep(launch, outcome)
            return True
        (view,) = launch.views()
        if not launch.waits:
            tag = launch.arguments[2]
            message = messages.setdefault(tag, Message())
            if launch.name.endswith("isend"):
                message.content = rank.run.tensor(view)
                rank.run.tensor(next(launch.made()))
            else:
                message.receiver_started = True
                rank.run.tensor(view)
            return True
        started = next(
            one
            for one in reversed(rank.bound.program.launches[: launch.index])
            if one.is_collective and not one.waits and view.value in one.writes
        )
        message = messages[started.arguments[2]]
        if started.name.endswith("isend"):
            return message.receiver_started
        if message.content is None:
            return False
        rank.run.tensor(view).copy_(message.content)
        return True


class Alone:
    """The step on one rank, on separate memory."""

    def __init__(self, captured: offload.Captured) -> None:
        held = captured.bound.bindings.weights
        weights = {value: one[0].untyped_storage().clone() for value, one in held.items()}
        self.rank = Rank(captured.bound, weights)

    def __call__(self, inputs: list[torch.UntypedStorage]) -> list[torch.Tensor]:
        self.rank.begin(inputs)
        for launch in self.rank.bound.program.launches:
            outcome = self.rank.run.call(launch)()
            self.rank.run.keep(launch, outcome)
        return [self.rank.result(at) for at in range(len(self.rank.bound.program.results))]

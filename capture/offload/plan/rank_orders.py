"""Orders of a training step on ranks: launches by a schedule, and the messages between them.

Each rank has memory of its own for each Value that its launches touch: a `Holding`. A launch that
touches a Value which another rank wrote last finds the content of that version by a message, which
is sent once to each rank. A rank holds one content of a Value at a time from its launches' point of
view in recorded order; what is received later is another Holding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from offload.plan.schedules import Pass, Schedule, passes_of
from offload.plan.shared_parts import draw_positions, guard_parts, shared_parts
from offload.program.launch import Launch
from offload.program.per_tensor import merges, n_tensors, of_tensors
from offload.program.program import Program
from offload.program.step_parts import Part, Phase, StepParts
from offload.program.values import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """Memory of one rank for a Value.

    Attributes:
        value: of the whole step.
        message: the tag of the message that gives its first content; None: launches of this rank
            give it, or it is the caller's memory.
    """

    value: int
    message: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class VersionMessage:
    """The content of a Value that one rank sends another.

    Attributes:
        value: of the whole step.
        version: the number of launches of the step that have written the Value.
        sender, receiver: ranks, by their stages.
        tag: distinguishes all messages of a step.
    """

    value: int
    version: int
    sender: int
    receiver: int
    tag: int


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A launch on one rank, for some or all of its tensors.

    Attributes:
        launch: over Values of the whole step; `index` is that of the recorded launch.
        phase, micro_batch: its pass.
        operands: by Value that it touches, its Holding's position on the rank.
    """

    launch: Launch
    phase: Phase
    micro_batch: int
    operands: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A rank's end of a message: it starts to send or receive, or waits until that is done.

    Attributes:
        message: what is exchanged.
        sends: this rank is the sender.
        waits: for the end; otherwise it starts, and does not block.
        holding: on this rank.
    """

    message: VersionMessage
    sends: bool
    waits: bool
    holding: int


RankStep = Work | Exchange


@dataclasses.dataclass(frozen=True, slots=True)
class RankOrder:
    """What one rank does in a step, in order.

    Attributes:
        steps: launches and ends of messages.
        holdings: its memory.
        results: by Value that the step returns its holding; only on the last rank.
    """

    steps: tuple[RankStep, ...]
    holdings: tuple[Holding, ...]
    results: dict[int, int]

    @property
    def works(self) -> tuple[Work, ...]:
        """Its launches."""
        return tuple(one for one in self.steps if isinstance(one, Work))


def rank_orders(
    step: StepParts,
    stages: Sequence[int | None],
    homes: dict[int, int],
    schedule: Schedule,
    n_stages: int,
) -> tuple[RankOrder, ...]:
    """The order of each rank, without waits of senders (`await_sends` adds them).

    Args:
        step: the step in parts.
        stages: by part its stage; None: shared.
        homes: by weight that is written, the stage that keeps it.
        schedule: the order of passes.
        n_stages: at least 1.
    """
    return _Orders(step, homes, schedule, n_stages).found(stages)


@dataclasses.dataclass(slots=True)
class _Unit:
    """A Work, and where it stands."""

    work: Work
    position: int


class _Orders:
    """The orders as they are found, in recorded order. Owner: one call."""

    def __init__(
        self, step: StepParts, homes: dict[int, int], schedule: Schedule, n_stages: int
    ) -> None:
        self._step, self._program = step, step.program
        self._n_stages = n_stages
        self._passes: list[dict[Pass, int]] = [
            {one: at for at, one in enumerate(passes)}
            for passes in (
                passes_of(schedule, n_stages, step.n_micro_batches, stage)
                for stage in range(n_stages)
            )
        ]
        self._units: list[list[_Unit]] = [[] for _ in range(n_stages)]
        self._holdings: list[list[Holding]] = [[] for _ in range(n_stages)]
        self._current: list[dict[int, tuple[int, int]]] = [{} for _ in range(n_stages)]
        self._versions: dict[int, int] = defaultdict(int)
        self._writers = {view.value: 0 for view in self._program.inputs} | homes
        self._sent: dict[tuple[int, int, int], int] = {}  # tags by Value, version and receiver
        self._messages: list[tuple[VersionMessage, int, Work | None]] = []  # holding, maker
        self._makers: dict[int, Work] = {}

    def found(self, stages: Sequence[int | None]) -> tuple[RankOrder, ...]:
        shared = shared_parts(self._step, stages, self._n_stages)
        early = guard_parts(self._step)
        drawn = [draw_positions(self._step, passes) for passes in self._passes]
        by_launch = itertools.groupby(enumerate(self._step.parts), lambda one: one[1].launch.index)
        for index, of_launch in by_launch:
            recorded = self._program.launches[index]
            for rank, own in _by_rank(list(of_launch), stages, shared):
                for alike in _alike(own, early):
                    at, part = alike[0]
                    position = -1 if at in early else drawn[rank].get(at)
                    for launch in _merged(recorded, [part for _, part in alike]):
                        self._add(rank, part, launch, position)
        results: dict[int, int] = {}
        last = self._n_stages - 1
        for result in self._program.results:
            results[result.view.value] = self._holding(last, result.view.value)
        for units in self._units:
            units.sort(key=lambda one: (one.position, one.work.launch.index))
        return tuple(
            RankOrder(
                tuple(self._sequence(rank)),
                tuple(self._holdings[rank]),
                results if rank == last else {},
            )
            for rank in range(self._n_stages)
        )

    def _add(self, rank: int, part: Part, launch: Launch, position: int | None) -> None:
        """Add a launch of a rank; `position`: of a pass, or -1: before all; None: a new pass."""
        if position is None:
            passes = self._passes[rank]
            position = passes.get(Pass(part.phase, part.micro_batch), len(passes))
        made = {view.value for view in launch.made()}
        operands = {
            value: self._holding(rank, value, is_made=value in made)
            for value in dict.fromkeys((*launch.touched(), *made))
        }
        work = Work(launch, part.phase, part.micro_batch, operands)
        self._units[rank].append(_Unit(work, position))
        for value in dict.fromkeys(launch.writes):
            if value in self._step.shared:
                continue
            self._versions[value] += 1
            self._writers[value] = rank
            self._makers[value] = work
            self._current[rank][value] = operands[value], self._versions[value]

    def _holding(self, rank: int, value: int, *, is_made: bool = False) -> int:
        """The holding on a rank of the current version of a Value; a message may carry it."""
        version = 0 if value in self._step.shared else self._versions[value]
        holding, known = self._current[rank].get(value, (-1, -1))
        if known == version:
            return holding
        sender = self._writers.get(value, rank)
        holding = len(self._holdings[rank])
        self._current[rank][value] = holding, version
        if is_made or value in self._step.shared or sender == rank:
            self._holdings[rank].append(Holding(value))
            return holding
        tag = len(self._messages)
        self._holdings[rank].append(Holding(value, tag))
        message = VersionMessage(value, version, sender, rank, tag)
        self._holding(sender, value)  # an input or a weight that the sender does not use
        self._messages.append((message, holding, self._makers.get(value)))
        return holding

    # ---- sequences ---------------------------------------------------------------------------

    def _sequence(self, rank: int) -> Iterable[RankStep]:
        """Launches, each behind what it receives and before what it sends."""
        units = self._units[rank]
        starts, awaited = self._received(rank)
        sent = self._sends(rank)
        n_early = sum(one.position < 0 for one in units)
        for at in range(len(units) + 1):
            if at == n_early:
                yield from sent.get(-1, ())
            yield from starts.get(at, ())
            yield from awaited.get(at, ())
            if at < len(units):
                yield units[at].work
                yield from sent.get(at, ())

    def _sends(self, rank: int) -> dict[int, list[Exchange]]:
        """What a rank sends, by the position of the launch behind which it does; -1: at first."""
        at_of = {id(one.work): at for at, one in enumerate(self._units[rank])}
        found: dict[int, list[Exchange]] = defaultdict(list)
        for message, _, maker in self._messages:
            if message.sender == rank:
                at = -1 if maker is None or message.version == 0 else at_of[id(maker)]
                holding = self._sender_holding(message, maker)
                found[at].append(Exchange(message, True, False, holding))
        return found

    def _sender_holding(self, message: VersionMessage, maker: Work | None) -> int:
        if maker is not None and message.version:
            return maker.operands[message.value]
        holdings = self._holdings[message.sender]
        return next(
            at
            for at, one in enumerate(holdings)
            if one.value == message.value and one.message is None
        )

    def _received(self, rank: int) -> tuple[dict[int, list[Exchange]], dict[int, list[Exchange]]]:
        """Starts and waits of what a rank receives, by the position of the launch behind them.

        It starts to receive where the pass begins that first uses the content, or earlier: each
        sender's messages in the order in which they are sent.
        """
        units = self._units[rank]
        first_use: dict[int, int] = {}
        for at, unit in enumerate(units):
            for holding in unit.work.operands.values():
                first_use.setdefault(holding, at)
        begins: dict[int, int] = {}
        for at, unit in enumerate(units):
            begins.setdefault(unit.position, at)
        n_early = sum(one.position < 0 for one in units)
        starts: dict[int, list[Exchange]] = defaultdict(list)
        awaited: dict[int, list[Exchange]] = defaultdict(list)
        holding_of = {message.tag: holding for message, holding, _ in self._messages}
        for sender in range(self._n_stages):
            earliest = len(units)
            ordered = [
                one.message
                for _, sent in sorted(self._sends(sender).items())
                for one in sent
                if one.message.receiver == rank
            ]
            for message in reversed(ordered):
                holding = holding_of[message.tag]
                use = first_use.get(holding, len(units))
                begin = begins[units[use].position] if use < len(units) else use
                earliest = min(earliest, max(begin, n_early))
                starts[earliest].insert(0, Exchange(message, False, False, holding))
                awaited[use].insert(0, Exchange(message, False, True, holding))
        return starts, awaited


_Numbered = list[tuple[int, Part]]


def _by_rank(
    parts: _Numbered, stages: Sequence[int | None], shared: Sequence[set[int]]
) -> Iterator[tuple[int, _Numbered]]:
    """By rank its parts of a launch; a shared part may be on several ranks."""
    for rank, here in enumerate(shared):
        own = [one for one in parts if stages[one[0]] == rank or one[0] in here]
        if own:
            yield rank, own


def _alike(parts: _Numbered, early: set[int]) -> Iterator[_Numbered]:
    """Parts of a launch that run in the same pass."""
    found: dict[object, _Numbered] = defaultdict(list)
    for at, part in parts:
        found[part.phase, part.micro_batch, at in early].append((at, part))
    yield from found.values()


def _merged(launch: Launch, parts: Sequence[Part]) -> list[Launch]:
    """The launches of one rank for its parts of a recorded launch."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if not tensors or (not merges(launch) and len(tensors) < n_tensors(launch)):
        return [part.launch for part in parts]
    return [of_tensors(launch, tensors)]


def starts_as(program: Program, holding: Holding, *, is_first: bool) -> Role:
    """The role of a holding on a rank: the caller's memory, or an activation."""
    role = program.values[holding.value].role
    if holding.message is not None or (role is Role.INPUT and not is_first):
        return Role.ACTIVATION
    return Role.ACTIVATION if role is Role.OUTPUT else role

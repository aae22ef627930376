"""Checks the orders of a training step on ranks against the recorded step.

It shares no code with planners. The ranks are executed step by step over versions of contents in
place of bytes. A message is complete once both ends have started it, and a wait for either end
returns only then: blocking semantics, without any buffer between ranks. So orders that pass run to
their end wherever starts do not block, and each launch reads what it read in the recorded step.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.rank_orders import Exchange, RankOrder, Work
from offload.program import EffectKind, Launch, Program, Role
from offload.program.step_draws import GET_STATE

_GIVEN = (Role.INPUT, Role.WEIGHT, Role.DERIVED)


def check_rank_orders(program: Program, orders: Sequence[RankOrder]) -> None:
    """Prove that ranks in these orders compute the recorded step.

    Args:
        program: the recorded step.
        orders: by rank; the first has the inputs, the last returns the results.

    Raises:
        PlanError: a launch or message is missing or doubled; a launch would find another content
            than it was recorded with; the ends of messages between two ranks are in different
            orders; memory is touched while it is exchanged; a rank waits forever; the caller's
            memory or a result would not have its last content; a message or a write precedes a
            guard; or a rank draws other random numbers than the step, or in another order.
    """
    _check_launches(program, orders)
    _check_pairs(orders)
    for order in orders:
        _check_guards(program, order)
    _check_draws(program, orders)
    _Execution(program, orders).check()


def _check_launches(program: Program, orders: Sequence[RankOrder]) -> None:
    """Check that each write of a launch is made on one rank, or by a shared launch on some."""
    writers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, order in enumerate(orders):
        for work in order.works:
            for value in work.launch.writes:
                at = (work.launch.index, value)
                if rank in writers[at]:
                    raise PlanError(f"launch {at[0]} writes %{value} twice on rank {rank}")
                writers[at].add(rank)
            if work.launch.name != program.launches[work.launch.index].name:
                raise PlanError(f"launch {work.launch.index} is another on rank {rank}")
    for launch in program.launches:
        for value in launch.writes:
            if not writers[launch.index, value] and program.values[value].role in _GIVEN:
                raise PlanError(f"no rank runs launch {launch.index} ({launch.name})")


def _check_pairs(orders: Sequence[RankOrder]) -> None:
    """Check that two ranks start their messages in the same order, and wait for each once."""
    ends: dict[tuple[int, int, bool, bool], list[int]] = defaultdict(list)
    for rank, order in enumerate(orders):
        for step in order.steps:
            if isinstance(step, Exchange):
                message = step.message
                if rank != (message.sender if step.sends else message.receiver):
                    raise PlanError(f"rank {rank} has an end of message {message.tag} of others")
                pair = (message.sender, message.receiver)
                ends[(*pair, step.sends, step.waits)].append(message.tag)
    for sender, receiver in {pair[:2] for pair in ends}:
        sent, received = (ends[sender, receiver, sends, False] for sends in (True, False))
        if sent != received or len(set(sent)) != len(sent):
            raise PlanError(
                f"rank {sender} sends rank {receiver} the messages {sent}, which receives "
                f"{received}"
            )
        for sends in (True, False):
            if sorted(ends[sender, receiver, sends, True]) != sorted(sent):
                raise PlanError(f"ranks {sender} and {receiver} do not wait for each message once")


def _check_guards(program: Program, order: RankOrder) -> None:
    """Check that an execution ends at a guard before anything that others see."""
    guards = [launch.index for launch in program.launches if _is_guard(launch)]
    if missing := set(guards) - {work.launch.index for work in order.works}:
        raise PlanError(f"a rank does not run the guard {min(missing)}")
    changed = ""
    for step in order.steps:
        if isinstance(step, Exchange):
            changed = changed or f"message {step.message.tag}"
        elif _is_guard(step.launch):
            if changed:
                raise PlanError(f"{step.launch.source}: {changed} precedes the guard")
        elif any(program.values[one].role in _GIVEN for one in step.launch.writes):
            changed = changed or f"launch {step.launch.index} ({step.launch.name})"


def _check_draws(program: Program, orders: Sequence[RankOrder]) -> None:
    """Check that each generator moves on each rank as in the step, from the first rank's state."""
    recorded = _draws(program.launches)
    for rank, order in enumerate(orders):
        launches = [work.launch for work in order.works]
        found = _draws(launches)
        for generator in recorded.keys() | found.keys():
            expected, got = recorded[generator], found[generator]
            if expected != got:
                raise PlanError(
                    f"rank {rank} draws from generator {generator} by the launches {got}, and the "
                    f"step was recorded with {expected}"
                )
        if rank and any(launch.name == GET_STATE for launch in launches):
            raise PlanError(f"rank {rank} gives the state of its generator in place of rank 0")


def _draws(launches: Sequence[Launch]) -> dict[str, list[int]]:
    """By generator, the recorded indices of launches that move it, in order."""
    found: dict[str, list[int]] = defaultdict(list)
    for launch in launches:
        for effect in launch.effects:
            if effect.kind is EffectKind.GENERATOR:
                found[effect.name].append(launch.index)
    return found


def _is_guard(launch: Launch) -> bool:
    return any(one.kind is EffectKind.GUARD for one in launch.effects)


class _Execution:
    """An execution of all ranks over versions. Owner: one call."""

    def __init__(self, program: Program, orders: Sequence[RankOrder]) -> None:
        self._program, self._orders = program, orders
        self._writers: dict[int, list[int]] = defaultdict(list)  # by Value, ascending
        for launch in program.launches:
            for value in set(launch.writes):
                self._writers[value].append(launch.index)
        # By rank and holding, the version of its content; None: no content.
        self._contents = [self._first_contents(rank) for rank in range(len(orders))]
        # By rank and holding, the messages in progress: their tags, and whether the rank sends.
        self._busy: list[dict[int, list[tuple[int, bool]]]] = [defaultdict(list) for _ in orders]
        self._started: dict[tuple[int, bool], int | None] = {}  # by tag and end, what is sent
        self._at = [0] * len(orders)

    def _first_contents(self, rank: int) -> list[int | None]:
        """The caller's memory has its content, where each step leaves the last one there."""
        order = self._orders[rank]
        written = {
            holding: work.launch.index
            for work in order.works
            for value, holding in work.operands.items()
            if value in work.launch.writes
        }
        found: list[int | None] = []
        for at, holding in enumerate(order.holdings):
            role = self._program.values[holding.value].role
            writers = self._writers.get(holding.value)
            is_given = role in _GIVEN and holding.message is None
            if role is Role.INPUT:
                is_given = is_given and rank == 0
            elif writers:
                is_given = is_given and written.get(at) == writers[-1]
            found.append(0 if is_given else None)
        return found

    def check(self) -> None:
        while sum([self._go_on(rank) for rank in range(len(self._orders))]):
            pass
        for rank, order in enumerate(self._orders):
            if self._at[rank] < len(order.steps):
                step = order.steps[self._at[rank]]
                assert isinstance(step, Exchange)
                end = "the receiver of" if step.sends else "the sender of"
                raise PlanError(f"rank {rank} waits forever for {end} message {step.message.tag}")
            for value, holding in order.results.items():
                self._expect(rank, value, holding, len(self._writers[value]), "the result")
        returned = {one.view.value for one in self._program.results}
        if self._orders[-1].results.keys() != returned:
            raise PlanError("the last rank does not return the results")

    def _go_on(self, rank: int) -> bool:
        steps, begin = self._orders[rank].steps, self._at[rank]
        while self._at[rank] < len(steps):
            step = steps[self._at[rank]]
            if isinstance(step, Work):
                self._run(rank, step)
            elif not self._exchange(rank, step):
                break
            self._at[rank] += 1
        return self._at[rank] > begin

    def _run(self, rank: int, work: Work) -> None:
        launch = work.launch
        made = {view.value for view in launch.made()}
        who = f"launch {launch.index} ({launch.name})"
        for value in {*launch.touched(), *made}:
            holding = work.operands[value]
            busy = self._busy[rank][holding]
            if any(value in launch.writes or not sends for _, sends in busy):
                raise PlanError(f"{who} touches %{value} on rank {rank} while it is exchanged")
            version = bisect.bisect_left(self._writers.get(value, []), launch.index)
            if value not in made:
                self._expect(rank, value, holding, version, who)
            if value in launch.writes:
                self._contents[rank][holding] = version + 1

    def _expect(self, rank: int, value: int, holding: int, version: int, who: str) -> None:
        found = self._contents[rank][holding]
        is_it = self._orders[rank].holdings[holding].value == value
        is_unset = not version and self._program.values[value].role not in _GIVEN
        if not is_it or found != (None if is_unset else version):
            raise PlanError(
                f"{who} on rank {rank} would find %{value} "
                f"({self._program.values[value].name}) with {found} writes, and was recorded with "
                f"{version}"
            )

    def _exchange(self, rank: int, step: Exchange) -> bool:
        """Take a step of a message; returns whether it can end now."""
        tag, held = step.message.tag, self._busy[rank][step.holding]
        if not step.waits:
            if held and not step.sends:
                raise PlanError(f"rank {rank} receives message {tag} in memory that is exchanged")
            if step.sends:
                message = step.message
                who = f"message {tag}"
                self._expect(rank, message.value, step.holding, message.version, who)
            held.append((tag, step.sends))
            self._started[tag, step.sends] = self._contents[rank][step.holding]
            return True
        if (tag, not step.sends) not in self._started:
            return False
        if (tag, step.sends) not in held:
            raise PlanError(f"rank {rank} waits for message {tag}, which it has not started")
        held.remove((tag, step.sends))
        if not step.sends:
            self._contents[rank][step.holding] = self._started[tag, True]
        return True

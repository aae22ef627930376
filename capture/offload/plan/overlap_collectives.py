"""Orders of a Program's launches in which collectives are exchanged while launches run.

The launches keep every order that their bytes and effects require (`launch_conflicts`). In
addition, no start of a collective moves behind a wait that it preceded. So a new order only removes
dependencies of starts on waits: ranks that had no cyclic wait before have none in any new orders,
whichever order each rank takes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from offload.plan.collective_lanes import (
    CollectiveTimes,
    StartedCollective,
    collective_lanes,
    started_collectives,
)
from offload.plan.launch_conflicts import Conflict, launch_conflicts
from offload.plan.simulate_steps import simulate_steps
from offload.program import Program
from offload.program.rewrite import Rewritten, rewrite

RECORDED = "recorded order"

# Limits of concurrent collectives in the orders that are tried; None: any number.
_IN_FLIGHT = (None, 4, 2, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """An order of launches, and its duration.

    Attributes:
        order: the recorded indices of the launches, in the order in which they run.
        predicted_ns: of an execution, by simulation of its Steps.
        method: how it was found.
    """

    order: tuple[int, ...]
    predicted_ns: float
    method: str

    @property
    def is_recorded(self) -> bool:
        """Whether launches run in recorded order."""
        return all(at == launch for at, launch in enumerate(self.order))


def in_order(program: Program, order: Sequence[int]) -> Rewritten:
    """The same launches in another order; Values that no launch uses are dropped.

    Raises:
        ProgramError: a Value would be used before it is made, or a collective waited for before it
            is started.
    """
    return rewrite(program, [program.launches[one] for one in order])


def overlap_collectives(program: Program, times: CollectiveTimes) -> tuple[CollectiveOrder, ...]:
    """Find orders in which launches run while collectives are exchanged.

    List scheduling: a collective is started as soon as its inputs are there, and waited for once no
    other launch is ready, or once it has ended. Launches meanwhile are taken in recorded order, or
    by the longest chain of launches and collectives behind them (T. Adam, K. Chandy, J. Dickson, "A
    Comparison of List Schedules for Parallel Processing Systems", 1974). Other orders limit the
    number of concurrent collectives, and thus the memory that these hold.

    Args:
        program: of observed launches.
        times: the durations of launches and collectives.

    Returns:
        Orders from the quickest by simulation on, ending with the recorded order.

    Raises:
        PlanError: the durations are not of this Program's launches.
    """
    recorded = tuple(range(len(program.launches)))
    found = {recorded: CollectiveOrder(recorded, _simulated_ns(program, recorded, times), RECORDED)}
    for n_in_flight in _IN_FLIGHT:
        lists = _Lists(program, times, n_in_flight)
        at_once = "" if n_in_flight is None else f", {n_in_flight} at once"
        for method, order in lists.orders():
            if order not in found:
                predicted_ns = _simulated_ns(program, order, times)
                found[order] = CollectiveOrder(order, predicted_ns, f"{method}{at_once}")
    least_ns = found[recorded].predicted_ns
    quicker = sorted(
        (one for one in found.values() if one.predicted_ns < least_ns),
        key=lambda one: one.predicted_ns,
    )
    return (*quicker, found[recorded])


def lower_bound_ns(program: Program, times: CollectiveTimes) -> float:
    """A lower bound of any order: all launches, or all exchanges of one group."""
    of_groups: dict[str, float] = {}
    for one in started_collectives(program):
        taken_ns = of_groups.get(one.group, 0.0) + times.transfer_ns[one.start]
        of_groups[one.group] = taken_ns
    return max([sum(times.launch_ns), *of_groups.values()])


def _simulated_ns(program: Program, order: Sequence[int], times: CollectiveTimes) -> float:
    lanes = collective_lanes(in_order(program, order).program)
    launch_ns = [times.launch_ns[one] for one in order]
    transfer_ns = [times.transfer_ns[one] for one in order]
    return simulate_steps(lanes, launch_ns, transfer_ns).period_ns


class _Lists:
    """List schedules of a Program's launches, with a limit of concurrent collectives."""

    def __init__(self, program: Program, times: CollectiveTimes, n_in_flight: int | None) -> None:
        self._n_launches = len(program.launches)
        self._times = times
        self._collectives = started_collectives(program)
        self._started = {one.start: one for one in self._collectives}
        self._awaited = {one.waits[0]: one for one in self._collectives if one.waits}
        self._behind: list[list[int]] = [[] for _ in range(self._n_launches)]
        self._n_before = [0] * self._n_launches
        conflicts = {*launch_conflicts(program), *self._starts_before_waits(program)}
        if n_in_flight is not None:
            conflicts |= set(self._limited(n_in_flight))
        for first, second in conflicts:
            self._behind[first].append(second)
            self._n_before[second] += 1

    def orders(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each method with its order."""
        recorded = [float(launch) for launch in range(self._n_launches)]
        yield "as early as inputs, as late as readers", self._order(recorded, late_waits=True)
        chains = [-ns for ns in self._chains_ns()]
        yield "longest chain first", self._order(chains, late_waits=False)

    def _starts_before_waits(self, program: Program) -> Iterator[Conflict]:
        """Yield pairs of a start and a later wait; starts of one group keep their order anyway."""
        last: dict[str, int] = {}
        for launch in program.launches:
            if launch.waits:
                yield from ((start, launch.index) for start in last.values())
            elif launch.index in self._started:
                last[self._started[launch.index].group] = launch.index

    def _limited(self, n_in_flight: int) -> Iterator[Conflict]:
        """Yield pairs of a wait and the start that is `n_in_flight` collectives later."""
        behind: list[StartedCollective] = [one for one in self._collectives if one.waits]
        for one, other in zip(behind, behind[n_in_flight:], strict=False):
            if one.waits[0] < other.start:
                yield one.waits[0], other.start

    def _chains_ns(self) -> list[float]:
        """By launch, the longest chain from its begin on."""
        chains = [0.0] * self._n_launches
        for launch in reversed(range(self._n_launches)):
            behind_ns = max((chains[one] for one in self._behind[launch]), default=0.0)
            started = self._started.get(launch)
            if started is not None and started.waits:
                behind_ns = max(
                    behind_ns, self._times.transfer_ns[launch] + chains[started.waits[0]]
                )
            chains[launch] = self._times.launch_ns[launch] + behind_ns
        return chains

    def _order(self, priority: Sequence[float], *, late_waits: bool) -> tuple[int, ...]:
        """Run ready launches: starts, then by priority; a blocking wait only if alone ready.

        Args:
            priority: of each launch; the least is first.
            late_waits: waits, blocking or not, are taken only when nothing else is ready.
        """
        n_before = list(self._n_before)
        starts: list[int] = []
        others: list[tuple[float, int]] = []
        waits: list[tuple[float, int]] = []  # by the end of their collectives
        ends_ns: dict[int, float] = {}
        free_ns: dict[str, float] = {}
        now_ns = 0.0
        order: list[int] = []

        def ready(launch: int) -> None:
            if launch in self._started:
                heapq.heappush(starts, launch)
            elif launch in self._awaited:
                heapq.heappush(waits, (ends_ns[self._awaited[launch].start], launch))
            else:
                heapq.heappush(others, (priority[launch], launch))

        for launch in range(self._n_launches):
            if not n_before[launch]:
                ready(launch)
        while starts or others or waits:
            while waits and not late_waits and waits[0][0] <= now_ns:
                _, launch = heapq.heappop(waits)
                heapq.heappush(others, (priority[launch], launch))
            if starts:
                launch = heapq.heappop(starts)
            elif others:
                _, launch = heapq.heappop(others)
            else:
                ended_ns, launch = heapq.heappop(waits)
                now_ns = max(now_ns, ended_ns)
            now_ns += self._times.launch_ns[launch]
            if launch in self._started:
                group = self._started[launch].group
                begin_ns = max(now_ns, free_ns.get(group, 0.0))
                ends_ns[launch] = free_ns[group] = begin_ns + self._times.transfer_ns[launch]
            order.append(launch)
            for one in self._behind[launch]:
                n_before[one] -= 1
                if not n_before[one]:
                    ready(one)
        return tuple(order)

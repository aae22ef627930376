"""Demands and plans, an interpreter of plans with random timing, and a brute-force planner."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from offload.plan import stream_weights
from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import Copy, Record, Run, Transfer, Wait, prologue
from offload.plan.streaming import Streaming, WeightDemand, WeightUse
from offload.plan.topology import Link, MemoryLayout, MemoryUnit

GRANULE = 4096
ALIGNMENT = 256
LINK = Link(bytes_per_second=1e9, overhead_ns=100.0)  # one byte takes a nanosecond
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def chain(sizes_bytes, launch_ns=1_000.0) -> WeightDemand:
    """A separate launch reads each weight."""
    weights = [
        WeightUse(index, size_bytes, (index,), f"weight {index}")
        for index, size_bytes in enumerate(sizes_bytes)
    ]
    return WeightDemand((launch_ns,) * len(weights), tuple(weights))


@st.composite
def demands(draw, most_weights=16, single=False, unit=ALIGNMENT) -> WeightDemand:
    """Weights of a few pages, most of them read once."""
    n_launches = draw(st.integers(1, 24))
    launch_ns = draw(
        st.lists(st.integers(0, 30_000), min_size=n_launches, max_size=n_launches).map(
            lambda found: tuple(float(one) for one in found)
        )
    )
    launch = st.integers(0, n_launches - 1)
    weights = []
    for index in range(draw(st.integers(1, most_weights))):
        n_readers = 1 if single else draw(st.sampled_from((1, 1, 1, 1, 2, 3)))
        readers = draw(st.sets(launch, min_size=1, max_size=n_readers))
        size_bytes = unit * draw(st.integers(1 if not single else -(-GRANULE // unit), 100))
        stays = False if single else draw(st.integers(0, 9)) == 0
        weights.append(
            WeightUse(index, size_bytes, tuple(sorted(readers)), f"weight {index}", stays)
        )
    return WeightDemand(launch_ns, tuple(weights))


@st.composite
def demands_with_tables(draw) -> WeightDemand:
    """Weights of which some are tables, from which launches read rows."""
    demand = draw(demands())
    weights = []
    for weight in demand.weights:
        if weight.stays or not draw(st.booleans()):
            weights.append(weight)
            continue
        n_rows = tuple(draw(st.integers(0, 12)) for _ in weight.launches)
        row_bytes = draw(st.sampled_from((16, 64, 256)))
        weights.append(dataclasses.replace(weight, row_bytes=row_bytes, n_rows=n_rows))
    return dataclasses.replace(demand, weights=tuple(weights))


def without_tables(demand: WeightDemand) -> WeightDemand:
    """The same weights, with launches that read all of them."""
    weights = [dataclasses.replace(one, row_bytes=0, n_rows=()) for one in demand.weights]
    return dataclasses.replace(demand, weights=tuple(weights))


def plan(demand, budget_bytes, *, link=LINK, tails=True, mapped_link=None, unit=None):
    """`tails`: memory can be mapped, over `mapped_link` or the same link."""
    return stream_weights(
        demand,
        MemoryLayout(ALIGNMENT, GRANULE, unit or MemoryUnit()),
        link,
        budget_bytes,
        mapped_link=(mapped_link or link) if tails else None,
    )


def floor_of(demand) -> int:
    return plan(demand, 1 << 40).floor.required_bytes


def full_of(demand) -> int:
    return sum(-(-one.size_bytes // ALIGNMENT) * ALIGNMENT for one in demand.weights)


class WrongBytes(Exception):
    """A launch read bytes that were not its weight's."""


class Stuck(Exception):
    """Neither lane can continue."""


class Interpreter:
    """Executes the steps of a plan on memory in which each cell of ALIGNMENT bytes holds a tag.

    A tag is (weight, offset in it), or None: poison. A copy poisons its cells while it runs. The
    next lane to move is drawn; launches and copies take two moves, so that other lanes move
    meanwhile.
    """

    def __init__(self, demand: WeightDemand, streaming: Streaming, seed: int) -> None:
        self.demand, self.plan = demand, streaming
        self.draw = random.Random(seed)
        self.eager_lane = self.draw.randrange(len(streaming.lanes))
        self.eagerness = self.draw.choice((0.5, 0.95))
        n_cells = max(
            (
                -(-one.memory_offset_bytes // ALIGNMENT) + -(-one.size_bytes // ALIGNMENT)
                for one in streaming.pieces
            ),
            default=0,
        )
        self.gathered = {one.value for one in streaming.gathers}
        self.cells: list[tuple | None] = [None] * n_cells
        self.pieces_of: dict[int, list] = {}
        for piece in streaming.pieces:
            self.pieces_of.setdefault(piece.value, []).append(piece)
            if not piece.streamed:
                self._fill(piece)
        self.events: set[tuple[int, int]] = set()
        for lane in streaming.lanes:
            for step in prologue(lane):
                if isinstance(step, Copy):
                    self._fill(streaming.pieces[step.piece])
                else:
                    self.events.add((step.event, -1))
        # By lane: the execution, its step, and the progress of the step.
        self.at = [[0, 0, 0] for _ in streaming.lanes]

    def run(self, n_passes: int) -> None:
        lanes = range(len(self.plan.lanes))
        while any(self.at[lane][0] < n_passes for lane in lanes):
            free = [lane for lane in lanes if self.at[lane][0] < n_passes and self._may_go_on(lane)]
            if not free:
                raise Stuck
            if self.eager_lane in free and self.draw.random() < self.eagerness:
                free = [self.eager_lane]
            self._go_on(self.draw.choice(free))

    def _may_go_on(self, lane: int) -> bool:
        execution, index, _ = self.at[lane]
        step = self.plan.lanes[lane].steps[index]
        if not isinstance(step, Wait):
            return True
        if (step.event, execution - step.age) in self.events:
            return True
        return execution == 0 and step.age == 1 and self._is_recorded(step.event)

    def _is_recorded(self, event: int) -> bool:
        return any(Record(event) in lane.steps for lane in self.plan.lanes)

    def _go_on(self, lane: int) -> None:
        execution, index, moves = self.at[lane]
        steps = self.plan.lanes[lane].steps
        step = steps[index]
        n_moves = 1
        if isinstance(step, Record):
            self.events.add((step.event, execution))
        elif isinstance(step, Copy):
            n_moves = 2
            piece = self.plan.pieces[step.piece]
            for cell, _ in self._cells(piece):
                self.cells[cell] = None
            if moves == 1:
                self._fill(piece)
        elif isinstance(step, Run):
            n_moves = 2 * (step.last - step.first)
            self._read(step.first + moves // 2, execution)
        if moves + 1 < n_moves:
            self.at[lane][2] = moves + 1
        elif index + 1 < len(steps):
            self.at[lane] = [execution, index + 1, 0]
        else:
            self.at[lane] = [execution + 1, 0, 0]

    def _cells(self, piece) -> Iterator[tuple[int, int]]:
        first = piece.memory_offset_bytes // ALIGNMENT
        for step in range(-(-piece.size_bytes // ALIGNMENT)):
            yield first + step, piece.offset_bytes + step * ALIGNMENT

    def _fill(self, piece) -> None:
        for cell, offset in self._cells(piece):
            self.cells[cell] = (piece.value, offset)

    def _read(self, launch: int, execution: int) -> None:
        for weight in self.demand.weights:
            if launch not in weight.launches or weight.value in self.gathered:
                continue
            for piece in self.pieces_of[weight.value]:
                for cell, offset in self._cells(piece):
                    if self.cells[cell] != (weight.value, offset):
                        raise WrongBytes(f"launch {launch} of {execution}: {self.cells[cell]}")


# ---- by brute force -----------------------------------------------------------------------------


def reference_period_ns(launch_ns, transfers, n_passes=40) -> float:
    """The last of this many periods; transfers are (ns, first launch, step to wait for)."""
    n_launches = len(launch_ns)
    ends: dict[int, float] = {}
    compute = copy = 0.0
    periods = []
    for number in range(n_passes):
        waiting = list(transfers)
        begin = compute
        for launch in range(n_launches):
            # Everything that this launch needs is copied in order, with all transfers before it.
            while any(first <= launch for _, first, _ in waiting):
                ns, first, step = waiting.pop(0)
                free = ends.get(number * n_launches + step, 0.0)
                copy = max(copy, free) + ns
                compute = max(compute, copy) if first == launch else compute
            compute += launch_ns[launch]
            ends[number * n_launches + launch] = compute
        periods.append(compute - begin)
    return periods[-1]


def brute_force_ns(demand: WeightDemand, link: Link, budget_bytes: int, unit: int) -> float:
    """The least period over all sets of whole weights and positions that fit; inf if none.

    Positions and sizes are multiples of `unit`; each streamed weight has one position in all
    passes. Transfers run in the order of first readers, and in any order for weights with the same
    first reader.
    """
    sizes = [one.size_bytes // unit for one in demand.weights]
    assert all(one.size_bytes % unit == 0 for one in demand.weights)
    best = float("inf")
    for flags in itertools.product((False, True), repeat=len(sizes)):
        streamed = [one for flag, one in zip(flags, demand.weights, strict=True) if flag]
        room = budget_bytes // unit - sum(
            size for flag, size in zip(flags, sizes, strict=True) if not flag
        )
        if streamed and room >= max(one.size_bytes // unit for one in streamed):
            for order in _orders(streamed):
                best = min(best, _best_positions_ns(demand, order, link, room, unit))
        elif not streamed and room >= 0:
            best = min(best, sum(demand.launch_ns))
    return best


def _orders(weights: list[WeightUse]) -> Iterator[tuple[WeightUse, ...]]:
    for order in itertools.permutations(weights):
        firsts = [one.launches[0] for one in order]
        if firsts == sorted(firsts):
            yield order


def _best_positions_ns(demand, order, link: Link, room: int, unit: int) -> float:
    """The best over all positions of these weights in a ring of this many units."""
    n_launches = len(demand.launch_ns)
    sizes = [one.size_bytes // unit for one in order]
    first = torch.tensor([one.launches[0] for one in order], dtype=torch.int16)
    waits: set[tuple[int, ...]] = set()
    # A mirrored ring is equivalent: the first piece lies in the lower half.
    for begin in range((room - sizes[0]) // 2 + 1):
        grids = [torch.arange(room - size + 1, dtype=torch.int16) for size in sizes[1:]]
        begins = [torch.tensor([begin], dtype=torch.int16), *grids]
        places = torch.cartesian_prod(*begins).reshape(-1, len(order)).T
        steps = torch.stack(
            [_steps(order, sizes, places, index, n_launches) for index in range(len(order))], 1
        )
        steps = torch.cummax(steps, 1).values  # a transfer follows the one before
        steps = steps[(steps < first).all(1)]
        waits.update(map(tuple, torch.unique(steps, dim=0).tolist()))
    bytes_of = [one.size_bytes for one in order]
    best = float("inf")
    for steps in waits:
        transfers = [
            Transfer(0, one.launches[0], step % n_launches, step // n_launches)
            for one, step in zip(order, steps, strict=True)
        ]
        found = simulate_transfers(demand.launch_ns, transfers, bytes_of, link)
        best = min(best, found.period_ns)
    return best


def _steps(order, sizes, places, index: int, n_launches: int) -> torch.Tensor:
    """The step that a transfer waits for: the last reader of any overlapping piece."""
    latest = torch.full_like(places[0], -n_launches + order[index].launches[-1])
    for other, weight in enumerate(order):
        step = weight.launches[-1] - (0 if other < index else n_launches)
        overlaps = (places[index] < places[other] + sizes[other]) & (
            places[other] < places[index] + sizes[index]
        )
        latest = torch.where(overlaps & (latest < step), step, latest)
    return latest


@st.composite
def demands_and_budgets(draw):
    """Draw a demand, and a budget between its floor and all its weights."""
    demand = draw(demands())
    floor, full = floor_of(demand), full_of(demand)
    return demand, draw(st.integers(floor, full + ALIGNMENT))

"""Demands, an interpreter of plans with random timing, and a planner by brute force."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from hypothesis import strategies as st

from offload.streaming import Link, Streaming, WeightDemand, WeightUse

GRANULE = 4096
ALIGNMENT = 256
LINK = Link(bytes_per_second=1e9, overhead_ns=100.0)  # one byte takes a nanosecond


def chain(sizes_bytes, launch_ns=1_000.0) -> WeightDemand:
    """Each weight is read by a launch of its own."""
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
    """Weights of which some are tables of which launches read rows."""
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
    """The same, of which launches read all."""
    weights = [dataclasses.replace(one, row_bytes=0, n_rows=()) for one in demand.weights]
    return dataclasses.replace(demand, weights=tuple(weights))


class WrongBytes(Exception):
    """A launch read bytes that were not its weight's."""


class Stuck(Exception):
    """Neither lane can go on."""


class Interpreter:
    """Executes a plan on memory in which each cell of ALIGNMENT bytes holds a tag.

    A tag is (weight, offset in it, pass), or None: poison. A transfer poisons its cells while it
    runs, and what it brought is poisoned when the last launch that reads it has ended. Which lane
    moves next is drawn.
    """

    def __init__(self, demand: WeightDemand, streaming: Streaming, seed: int) -> None:
        self.demand, self.plan = demand, streaming
        self.draw = random.Random(seed)
        self.copies_first = self.draw.choice((0.05, 0.5, 0.95))
        self.n_launches, self.n_transfers = len(demand.launch_ns), len(streaming.transfers)
        n_cells = max(
            (
                -(-one.memory_offset_bytes // ALIGNMENT) + -(-one.size_bytes // ALIGNMENT)
                for one in streaming.pieces
            ),
            default=0,
        )
        self.gathered = {one.value for one in streaming.gathers}
        self.cells: list[tuple | None] = [None] * n_cells
        self.launched = self.copied = 0  # ended, over all passes
        self.launching = self.copying = False
        self.pieces_of: dict[int, list] = {}
        for piece in streaming.pieces:
            self.pieces_of.setdefault(piece.value, []).append(piece)
            if not piece.streamed:
                self._fill(piece, None)

    def run(self, n_passes: int) -> None:
        while self.launched < n_passes * self.n_launches:
            moves = [move for move in (self._copy_lane, self._compute_lane) if move(True)]
            if not moves:
                raise Stuck
            if len(moves) == 2:
                moves = [moves[0] if self.draw.random() < self.copies_first else moves[1]]
            moves[0](False)

    def _copy_lane(self, ask: bool) -> bool:
        if not self.n_transfers:
            return False
        number, index = divmod(self.copied, self.n_transfers)
        one = self.plan.transfers[index]
        piece = self.plan.pieces[one.piece]
        if self.copying:
            if not ask:
                self._fill(piece, number)
                self.copying, self.copied = False, self.copied + 1
            return True
        after = (number + one.after_pass) * self.n_launches + one.after_launch
        if self.launched <= after:
            return False
        if not ask:
            for cell, _ in self._cells(piece):
                self.cells[cell] = None
            self.copying = True
        return True

    def _compute_lane(self, ask: bool) -> bool:
        number, launch = divmod(self.launched, self.n_launches)
        if not self.launching:
            for index, one in enumerate(self.plan.transfers):
                if one.first_launch == launch and number * self.n_transfers + index >= self.copied:
                    return False
        if not ask:
            self._read(launch, number)
            if self.launching:
                self.launched += 1
                self._poison(launch, number)
            self.launching = not self.launching
        return True

    def _cells(self, piece) -> Iterator[tuple[int, int]]:
        first = piece.memory_offset_bytes // ALIGNMENT
        for step in range(-(-piece.size_bytes // ALIGNMENT)):
            yield first + step, piece.offset_bytes + step * ALIGNMENT

    def _fill(self, piece, number: int | None) -> None:
        for cell, offset in self._cells(piece):
            self.cells[cell] = (piece.value, offset, number)

    def _read(self, launch: int, number: int) -> None:
        for weight in self.demand.weights:
            if launch not in weight.launches or weight.value in self.gathered:
                continue
            for piece in self.pieces_of[weight.value]:
                for cell, offset in self._cells(piece):
                    tag = (weight.value, offset, number if piece.streamed else None)
                    if self.cells[cell] != tag:
                        raise WrongBytes(f"launch {launch} of pass {number}: {self.cells[cell]}")

    def _poison(self, launch: int, number: int) -> None:
        for weight in self.demand.weights:
            if weight.value in self.gathered:
                continue
            if weight.launches and weight.launches[-1] == launch:
                for piece in self.pieces_of[weight.value]:
                    for cell, _ in self._cells(piece) if piece.streamed else ():
                        found = self.cells[cell]
                        if found and found[0] == weight.value and found[2] == number:
                            self.cells[cell] = None


# ---- by brute force -----------------------------------------------------------------------------


def reference_period_ns(launch_ns, transfers, n_passes=40) -> float:
    """The last of so many passes; transfers are (ns, first launch, step to wait for)."""
    n_launches = len(launch_ns)
    ends: dict[int, float] = {}
    compute = copy = 0.0
    periods = []
    for number in range(n_passes):
        waiting = list(transfers)
        begin = compute
        for launch in range(n_launches):
            # Whatever must be there for this launch is copied, in order, with all before it.
            while any(first <= launch for _, first, _ in waiting):
                ns, first, step = waiting.pop(0)
                free = ends.get(number * n_launches + step, 0.0)
                copy = max(copy, free) + ns
                compute = max(compute, copy) if first == launch else compute
            compute += launch_ns[launch]
            ends[number * n_launches + launch] = compute
        periods.append(compute - begin)
    return periods[-1]


def brute_force_ns(demand: WeightDemand, link: Link, budget_bytes: int, alignment: int) -> float:
    """The least period over all sets of whole weights and all rings in rounds that fit; inf: none.

    A ring in rounds: the transfers of a pass, in the order of their readers, are cut into runs, and
    the pieces of each run lie side by side from the ring's begin.
    """
    n_launches = len(demand.launch_ns)
    aligned = [-(-one.size_bytes // alignment) * alignment for one in demand.weights]
    best = float("inf")
    for flags in itertools.product((False, True), repeat=len(aligned)):
        streamed = [index for index, flag in enumerate(flags) if flag]
        streamed.sort(key=lambda index: demand.weights[index].launches[0])
        resident = sum(aligned) - sum(aligned[index] for index in streamed)
        for cuts in itertools.product((False, True), repeat=max(0, len(streamed) - 1)):
            places, ring = _in_rounds(streamed, aligned, cuts)
            if resident + ring > budget_bytes:
                continue
            transfers = []
            for number, index in enumerate(streamed):
                weight = demand.weights[index]
                step = max(
                    demand.weights[other].launches[-1] - (0 if position < number else n_launches)
                    for position, other in enumerate(streamed)
                    if places[position][0] < places[number][1]
                    and places[number][0] < places[position][1]
                )
                ns = link.overhead_ns + weight.size_bytes / link.bytes_per_second * 1e9
                transfers.append((ns, weight.launches[0], step))
            latest = itertools.accumulate((step for _, _, step in transfers), max)
            if all(step < first for step, (_, first, _) in zip(latest, transfers, strict=True)):
                best = min(best, reference_period_ns(demand.launch_ns, transfers))
    return best


def _in_rounds(streamed, aligned, cuts) -> tuple[list[tuple[int, int]], int]:
    places: list[tuple[int, int]] = []
    end = 0
    for number, index in enumerate(streamed):
        begin = 0 if number and cuts[number - 1] else end
        end = begin + aligned[index]
        places.append((begin, end))
    return places, max((end for _, end in places), default=0)

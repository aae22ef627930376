"""Plans weight streaming under a budget. The search is done in native/plan/streaming_search.cpp."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from offload.errors import PlanError
from offload.native import _planner
from offload.plan.check_streaming import check_streaming
from offload.plan.gather_tables import Choice, gather_choices, may_be_gathered
from offload.plan.memory import round_up
from offload.plan.simulate_streaming import simulate_transfers
from offload.plan.steps import Transfer, streaming_lanes
from offload.plan.streaming import Piece, Streaming, StreamingFloor, WeightDemand, WeightUse
from offload.plan.topology import Link, MemoryLayout, MemoryUnit
from offload.plan.whole_weights import Layout, WholeWeights


def stream_weights(
    demand: WeightDemand,
    memory: MemoryLayout,
    link: Link,
    budget_bytes: int,
    *,
    mapped_link: Link | None = None,
) -> Streaming:
    """Plan which bytes of weights stay in device memory, and when the others are copied.

    The result is the quickest of a fixed family of plans, by simulation. A larger budget admits
    every plan that a smaller one admits, so more budget is never slower. That holds for each of the
    `gather_choices` of gathered tables, and thus for the quickest of them; among equally quick ones
    the plan that reads least is chosen. Nothing is timed: the same input gives the same plan. It
    has passed `check_streaming`.

    Args:
        demand: weights, their readers, and the time that hides transfers.
        memory: the memory into which they are copied.
        link: the cost of copies.
        budget_bytes: all device memory that weights may use, including the ring.
        mapped_link: the cost of copies into memory that is mapped side by side, so that weights may
            be streamed in part; None: no such memory. The plan's `link` is the one that it assumes.

    Raises:
        PlanError: no plan fits the budget (the message gives the least budget, and what sets it),
            or the demand, the link or an option is out of range.
    """
    _require_valid(demand, (link, mapped_link), memory)
    choices = gather_choices(demand, link, memory.alignment_bytes)
    options = _Options(link, mapped_link, memory)
    unit = memory.unit
    lowest = min(choices, key=lambda one: one.least.required_bytes)
    required_bytes = unit.taken_bytes(lowest.least.required_bytes)
    choice, layout = _quickest(choices, options, unit.usable_bytes(required_bytes))
    floor = _floor(lowest, layout.period_ns, required_bytes)
    if budget_bytes < required_bytes:
        raise PlanError(_below_floor(floor, budget_bytes, unit))
    if budget_bytes > required_bytes:
        choice, layout = _quickest(choices, options, unit.usable_bytes(budget_bytes))
    result = _streaming(choice, options, layout, floor, budget_bytes)
    result = dataclasses.replace(result, unit=unit)
    check_streaming(demand, result)
    return result


def roofline_ns(demand: WeightDemand, link: Link, budget_bytes: int) -> float:
    """max(compute, (weights - budget) / bandwidth): no plan is quicker.

    At the beginning of a pass at most the budget is resident, and every byte is read; of tables
    that may be gathered, only the rows.
    """
    weights_bytes = sum(
        one.rows_bytes if may_be_gathered(one) else one.size_bytes for one in demand.weights
    )
    streamed_bytes = max(0, weights_bytes - budget_bytes)
    return max(math.fsum(demand.launch_ns), streamed_bytes / link.bytes_per_second * 1e9)


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    link: Link
    mapped_link: Link | None
    memory: MemoryLayout

    @property
    def links(self) -> tuple[tuple[Link, bool], ...]:
        """Links to search with, and whether weights may be streamed in part over each.

        A search with parts also finds plans without them.
        """
        if self.mapped_link is None:
            return ((self.link, False),)
        if self.mapped_link == self.link:
            return ((self.link, True),)
        return ((self.link, False), (self.mapped_link, True))


def _quickest(
    choices: Sequence[Choice], options: _Options, budget_bytes: int
) -> tuple[Choice, Layout]:
    """The quickest choice that the budget admits, and its layout.

    Where that is quicker, weights are also streamed in part, over the link to mapped memory, and
    copied more than once in a pass.
    """
    found = [
        (choice, _search(choice.rest, options, link, choice.floor, budget_bytes, tails=tails))
        for choice in choices
        if choice.floor.required_bytes <= budget_bytes
        for link, tails in options.links
    ]
    found += [
        (choice, plan.layout)
        for choice in choices
        for plan in choice.repeated
        if plan.required_bytes <= budget_bytes
    ]

    def cost(one: tuple[Choice, Layout]) -> tuple[float, int]:
        choice, layout = one
        gathered_bytes = sum(each.size_bytes for each in choice.gathers)
        return layout.period_ns, layout.transfer_bytes + gathered_bytes

    return min(found, key=cost)


def _search(
    demand: WeightDemand,
    options: _Options,
    link: Link,
    serial: WholeWeights,
    budget_bytes: int,
    *,
    tails: bool,
) -> Layout:
    """The quickest plan of the family, or the serial plan if no plan is quicker."""
    alignment_bytes = options.memory.alignment_bytes
    weights_bytes = sum(round_up(one.size_bytes, alignment_bytes) for one in demand.weights)
    if budget_bytes >= weights_bytes:
        compute_ns = simulate_transfers(demand.launch_ns, (), (), link).period_ns
        return Layout({}, (), 0, compute_ns, link)
    found, _ = _planner.search_streaming(
        demand.launch_ns,
        [
            (one.size_bytes, 0, 0, True)
            if one.stays
            else (one.size_bytes, one.launches[0], one.launches[-1], False)
            for one in demand.weights
        ],
        bytes_per_second=link.bytes_per_second,
        overhead_ns=link.overhead_ns,
        budget_bytes=budget_bytes,
        floor_bytes=serial.required_bytes,
        floor_period_ns=serial.layout.period_ns,
        alignment_bytes=alignment_bytes,
        granule_bytes=options.memory.piece_bytes,
        tails=tails,
    )
    if found is None:
        return serial.layout
    streamed_bytes, offsets_bytes, order, after_steps, ring_bytes, period_ns = found
    parts = {index: (streamed_bytes[index], offsets_bytes[index]) for index in order}
    n_launches = len(demand.launch_ns)
    transfers = tuple(
        Transfer(
            piece=index,
            first_launch=demand.weights[index].launches[0],
            after_launch=step % n_launches,
            after_pass=step // n_launches,
        )
        for index, step in zip(order, after_steps, strict=True)
    )
    return Layout(parts, transfers, ring_bytes, period_ns, link)


def _floor(choice: Choice, period_ns: float, required_bytes: int) -> StreamingFloor:
    least = choice.least
    largest = choice.rest.weights[least.largest] if least.largest >= 0 else None
    return StreamingFloor(
        required_bytes=required_bytes,
        ring_bytes=least.layout.ring_bytes,
        resident_bytes=least.resident_bytes,
        value=largest.value if largest else -1,
        name=largest.name if largest else "nothing",
        period_ns=period_ns,
    )


def _streaming(
    choice: Choice,
    options: _Options,
    layout: Layout,
    floor: StreamingFloor,
    budget_bytes: int,
) -> Streaming:
    """Lay out resident parts of weights first, at granules, then the ring, then whole weights."""
    cut_bytes = [
        one.size_bytes - layout.parts[index][0] if index in layout.parts else 0
        for index, one in enumerate(choice.rest.weights)
    ]
    ring_begin = sum(cut_bytes)
    copied = {one.piece for one in layout.transfers}
    pieces: list[Piece] = []
    places: dict[int, int] = {}
    cut_at, whole_at = 0, ring_begin + layout.ring_bytes
    for index, weight in enumerate(choice.rest.weights):
        if index not in layout.parts:
            pieces.append(Piece(weight.value, 0, weight.size_bytes, whole_at, False))
            whole_at += round_up(weight.size_bytes, options.memory.alignment_bytes)
            continue
        if cut_bytes[index]:
            pieces.append(Piece(weight.value, 0, cut_bytes[index], cut_at, False))
            cut_at += cut_bytes[index]
        size_bytes, offset_bytes = layout.parts[index]
        places[index] = len(pieces)
        at = ring_begin + offset_bytes
        pieces.append(Piece(weight.value, cut_bytes[index], size_bytes, at, index in copied))
    transfers = [dataclasses.replace(one, piece=places[one.piece]) for one in layout.transfers]
    return Streaming(
        budget_bytes=budget_bytes,
        memory_bytes=whole_at,
        granule_bytes=options.memory.piece_bytes,
        pieces=tuple(pieces),
        lanes=streaming_lanes(len(choice.rest.launch_ns), transfers),
        period_ns=layout.period_ns,
        compute_ns=simulate_transfers(choice.demand.launch_ns, (), (), options.link).period_ns,
        roofline_ns=min(
            roofline_ns(choice.demand, link, budget_bytes) for link, _ in options.links
        ),
        floor=floor,
        link=layout.link,
        gathers=choice.gathers,
    )


def _require_valid(
    demand: WeightDemand,
    links: Sequence[Link | None],
    memory: MemoryLayout,
) -> None:
    granule_bytes, alignment_bytes = memory.piece_bytes, memory.alignment_bytes
    if alignment_bytes < 1 or granule_bytes < 1 or granule_bytes % alignment_bytes:
        raise PlanError(
            "expected an alignment of one byte or more that divides the granule, got "
            f"{alignment_bytes} and {granule_bytes}"
        )
    for link in links:
        if link is not None:
            _require_valid_link(link)
    for index, one in enumerate(demand.launch_ns):
        if not 0 <= one < math.inf:
            raise PlanError(f"expected a time of launch {index}, got {one} ns")
    for weight in demand.weights:
        _require_valid_weight(weight, len(demand.launch_ns))


def _require_valid_link(link: Link) -> None:
    overheads_ns = (link.overhead_ns, link.row_overhead_ns or 0.0)
    is_finite = all(0 <= one < math.inf for one in overheads_ns)
    if not (0 < link.bytes_per_second < math.inf and is_finite):
        raise PlanError(f"expected a link of more than 0 bytes per second, got {link}")


def _require_valid_weight(weight: WeightUse, n_launches: int) -> None:
    if weight.size_bytes < 0:
        raise PlanError(f"{weight.name} has {weight.size_bytes} bytes")
    if not weight.launches and not weight.stays:
        raise PlanError(f"{weight.name} is read by no launch, and is not resident")
    if any(not 0 <= launch < n_launches for launch in weight.launches) or any(
        one >= other for one, other in zip(weight.launches, weight.launches[1:], strict=False)
    ):
        raise PlanError(
            f"{weight.name}: expected launches of {n_launches}, ascending, got {weight.launches}"
        )
    is_table = weight.row_bytes > 0 and len(weight.n_rows) == len(weight.launches)
    if (weight.row_bytes or weight.n_rows) and not (
        is_table and min(weight.n_rows, default=0) >= 0
    ):
        raise PlanError(
            f"{weight.name}: expected a number of rows for each of {len(weight.launches)} "
            f"launches, got {weight.n_rows} of {weight.row_bytes} bytes"
        )


def _below_floor(floor: StreamingFloor, budget_bytes: int, unit: MemoryUnit) -> str:
    given = f" (the device gives memory by {unit.unit_bytes})" if unit.unit_bytes > 1 else ""
    ring = f"a ring of {floor.ring_bytes} bytes, set by {floor.name}, and " * bool(floor.ring_bytes)
    return (
        f"weights need at least {floor.required_bytes} bytes of the device's memory{given}, and "
        f"the budget is {budget_bytes}: {ring}{floor.resident_bytes} bytes of weights that stay. "
        f"Give a budget of {floor.required_bytes} bytes or more; at {floor.required_bytes} an "
        f"execution is predicted to take {floor.period_ns / 1e6:.3f} ms"
    )

"""Checks a plan of weight streaming, whoever made it, by the order that it guarantees alone.

What is guaranteed, at any speed of either lane: launches run in order, so do transfers; a transfer
begins after its `after_launch` and thereby after what any earlier transfer waited for; a launch
begins after the transfers whose `first_launch` it is.
"""

from __future__ import annotations

import bisect
import dataclasses

from offload.errors import PlanError
from offload.plan.streaming import Piece, Streaming, WeightDemand, WeightUse


def check_streaming(demand: WeightDemand, streaming: Streaming) -> None:
    """Prove that every launch reads its weights whole, in every pass and at every timing.

    Raises:
        PlanError: the pieces are not the weights whose rows are not gathered; rows are gathered for
            other launches than those that read them, or of a weight that stays or is no table;
            something lies outside of the memory, or the memory exceeds the budget; a piece that is
            cut lies where it cannot be mapped; a streamed piece has not just one transfer, or one
            that is not for its readers; transfers and launches wait for each other; or bytes are
            overwritten before their last reader has ended. The message names the weights, transfers
            and launches.
    """
    weights = {weight.value: weight for weight in demand.weights}
    gathered = _check_gathers(weights, streaming)
    _check_pieces(
        {value: one for value, one in weights.items() if value not in gathered}, streaming
    )
    _check_transfers(weights, len(demand.launch_ns), streaming)
    _check_resident(weights, streaming)
    _check_ring(weights, len(demand.launch_ns), streaming)


def _check_gathers(weights: dict[int, WeightUse], streaming: Streaming) -> set[int]:
    """Each launch that reads a gathered table gathers all its rows; gives the tables."""
    found: dict[int, list[tuple[int, int]]] = {}
    for one in streaming.gathers:
        weight = weights.get(one.value)
        if weight is None or weight.stays or not 0 < one.row_bytes == weight.row_bytes:
            raise PlanError(
                f"{weight.name if weight else f'value {one.value}'}: rows of {one.row_bytes} bytes "
                "are gathered, and it is no table of such rows, or must stay"
            )
        found.setdefault(one.value, []).append((one.launch, one.n_rows))
    for value, reads in found.items():
        expected = list(zip(weights[value].launches, weights[value].n_rows, strict=True))
        if reads != expected:
            raise PlanError(
                f"{weights[value].name}: expected rows to be gathered as (launch, rows) "
                f"{expected}, got {reads}"
            )
    return set(found)


def _check_pieces(weights: dict[int, WeightUse], streaming: Streaming) -> None:
    if streaming.taken_bytes > streaming.budget_bytes:
        raise PlanError(
            f"weights take {streaming.taken_bytes} bytes of a budget of {streaming.budget_bytes}"
        )
    found: dict[int, list[Piece]] = {}
    last = None
    for piece in streaming.pieces:
        if piece.value in found and piece.value != last:
            raise PlanError(f"the pieces of value {piece.value} do not stand side by side")
        found.setdefault(piece.value, []).append(piece)
        last = piece.value
    if found.keys() != weights.keys():
        odd = sorted(found.keys() ^ weights.keys())
        raise PlanError(f"values {odd} are weights without pieces, or pieces of no weight")
    for value, pieces in found.items():
        _check_weight(weights[value], pieces, streaming)


def _check_weight(weight: WeightUse, pieces: list[Piece], streaming: Streaming) -> None:
    at = 0
    for piece in pieces:
        size_is_possible = piece.size_bytes > 0 or (weight.size_bytes == 0 and len(pieces) == 1)
        if piece.offset_bytes != at or not size_is_possible:
            raise PlanError(
                f"{weight.name}: expected a piece from byte {at}, got {piece.size_bytes} bytes "
                f"from {piece.offset_bytes}"
            )
        at += piece.size_bytes
        end = piece.memory_offset_bytes + piece.size_bytes
        if piece.memory_offset_bytes < 0 or end > streaming.memory_bytes:
            raise PlanError(
                f"{weight.name}: bytes {piece.memory_offset_bytes} to {end} are outside of the "
                f"memory of {streaming.memory_bytes}"
            )
        granule = streaming.granule_bytes
        if len(pieces) > 1 and (
            piece.memory_offset_bytes % granule or piece.offset_bytes % granule
        ):
            raise PlanError(
                f"{weight.name}: its piece from byte {piece.offset_bytes} lies at "
                f"{piece.memory_offset_bytes}; pieces begin at multiples of {granule}"
            )
        if piece.streamed and weight.stays:
            raise PlanError(f"{weight.name} must stay resident, but is streamed")
    if at != weight.size_bytes:
        raise PlanError(f"{weight.name}: expected pieces of {weight.size_bytes} bytes, got {at}")


def _check_transfers(weights: dict[int, WeightUse], n_launches: int, streaming: Streaming) -> None:
    waiting = {index for index, piece in enumerate(streaming.pieces) if piece.streamed}
    for index, one in enumerate(streaming.transfers):
        if one.piece not in waiting:
            raise PlanError(
                f"transfer {index} brings piece {one.piece}, which is not streamed or was brought "
                "by an earlier one"
            )
        waiting.remove(one.piece)
        weight = weights[streaming.pieces[one.piece].value]
        readers = (weight.launches[0], weight.launches[-1])
        if (one.first_launch, one.last_launch) != readers:
            raise PlanError(
                f"transfer {index} of {weight.name} is for launches {one.first_launch} to "
                f"{one.last_launch}; {readers[0]} to {readers[1]} read it"
            )
        if one.after_pass not in (-1, 0) or not 0 <= one.after_launch < n_launches:
            raise PlanError(
                f"transfer {index} of {weight.name} waits for launch {one.after_launch} of pass "
                f"{one.after_pass:+d}; there are {n_launches} launches, of pass -1 and 0"
            )
    if waiting:
        piece = streaming.pieces[min(waiting)]
        raise PlanError(f"no transfer brings {weights[piece.value].name}")


def _check_resident(weights: dict[int, WeightUse], streaming: Streaming) -> None:
    """Resident bytes are nobody else's: no transfer's and no other resident piece's."""
    end, owner = 0, ""  # of all pieces up to here
    resident_end, resident_owner = 0, ""
    for piece in sorted(streaming.pieces, key=lambda one: one.memory_offset_bytes):
        if not piece.size_bytes:
            continue
        name, begin = weights[piece.value].name, piece.memory_offset_bytes
        limit, other = (resident_end, resident_owner) if piece.streamed else (end, owner)
        if begin < limit:
            raise PlanError(
                f"a piece of {name} at byte {begin} of the memory overlaps one of {other} that "
                f"ends at {limit}, and at least one of them is resident"
            )
        piece_end = begin + piece.size_bytes
        if piece_end > end:
            end, owner = piece_end, name
        if not piece.streamed:
            resident_end, resident_owner = piece_end, name


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """Bytes [begin, end) of the memory, the step that reads them last, and what brought them."""

    begin: int
    end: int
    step: int
    transfer: str


def _check_ring(weights: dict[int, WeightUse], n_launches: int, streaming: Streaming) -> None:
    """Walk two passes of transfers; of each byte it is known which step reads it last.

    Steps number the launches of the second pass from 0, those of the first from -n_launches. Every
    piece is brought once in each pass, so the second one stands for all that follow.
    """
    ranges: list[_Range] = []
    ended, waits = -2 * n_launches, ""  # the last step that has ended whatever the timing
    for pass_step in (-n_launches, 0):
        for index, one in enumerate(streaming.transfers):
            piece = streaming.pieces[one.piece]
            name = f"transfer {index} of {weights[piece.value].name}"
            after = pass_step + one.after_pass * n_launches + one.after_launch
            if after > ended:
                ended, waits = after, name
            if ended >= pass_step + one.first_launch:
                raise PlanError(
                    f"launch {one.first_launch} waits for {name}, and that for launch "
                    f"{ended - pass_step} of the same pass, because {waits} does"
                )
            begin, end = piece.memory_offset_bytes, piece.memory_offset_bytes + piece.size_bytes
            old = _overlapping(ranges, begin, end)
            for found in ranges[old]:
                if found.step > ended:
                    raise PlanError(_race(name, found, ended, n_launches))
            ranges[old] = _replaced(
                ranges[old], _Range(begin, end, pass_step + one.last_launch, name)
            )


def _race(name: str, found: _Range, ended: int, n_launches: int) -> str:
    reader, late = found.step % n_launches, found.step - ended
    return (
        f"{name} may overwrite what {found.transfer} brought to bytes {found.begin} to {found.end} "
        f"before launch {reader} has read it: it begins up to {late} launches too early"
    )


def _overlapping(ranges: list[_Range], begin: int, end: int) -> slice:
    """Which of the ranges, in the order of bytes, share bytes with [begin, end)."""
    first = bisect.bisect_right(ranges, begin, key=lambda one: one.end)
    last = bisect.bisect_left(ranges, end, lo=first, key=lambda one: one.begin)
    return slice(first, last)


def _replaced(old: list[_Range], new: _Range) -> list[_Range]:
    """What is left of the old ranges on both sides of the new one, and that."""
    result = [new]
    if old and old[0].begin < new.begin:
        result.insert(0, dataclasses.replace(old[0], end=new.begin))
    if old and old[-1].end > new.end:
        result.append(dataclasses.replace(old[-1], begin=new.end))
    return result

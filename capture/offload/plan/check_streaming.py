"""Checks a plan of weight streaming: its pieces, and by `check_steps` its order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from offload.errors import PlanError
from offload.plan.check_steps import Touch, check_steps
from offload.plan.steps import Copy
from offload.plan.streaming import Piece, Streaming, WeightDemand, WeightUse


def check_streaming(demand: WeightDemand, streaming: Streaming) -> None:
    """Prove that every launch reads its weights whole, in every pass and at every timing.

    Raises:
        PlanError: the pieces are not exactly the weights whose rows are not gathered; rows are
            gathered for other launches than those that read them, or from a weight that stays or is
            no table; a piece lies outside the memory, or the memory exceeds the budget; a cut piece
            lies where it cannot be mapped; a streamed piece is not copied, or a resident one is; or
            the order of steps does not protect a weight, see `check_steps`. The message names the
            weights and launches.
    """
    weights = {weight.value: weight for weight in demand.weights}
    gathered = _check_gathers(weights, streaming)
    _check_pieces(
        {value: one for value, one in weights.items() if value not in gathered}, streaming
    )
    _check_copies(weights, streaming)
    _check_resident(weights, streaming)
    _check_order(weights, len(demand.launch_ns), streaming)


def _check_gathers(weights: dict[int, WeightUse], streaming: Streaming) -> set[int]:
    """Check that each reader of a gathered table gathers all its rows; return the tables."""
    found: dict[int, list[tuple[int, int]]] = {}
    for one in streaming.gathers:
        weight = weights.get(one.value)
        if weight is None or weight.stays or not 0 < one.row_bytes == weight.row_bytes:
            raise PlanError(
                f"{weight.name if weight else f'value {one.value}'}: rows of {one.row_bytes} "
                "bytes are gathered, but it is not a table of such rows, or must stay resident"
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
            raise PlanError(f"the pieces of value {piece.value} are not adjacent")
        found.setdefault(piece.value, []).append(piece)
        last = piece.value
    if found.keys() != weights.keys():
        odd = sorted(found.keys() ^ weights.keys())
        raise PlanError(
            f"values {odd} are weights without pieces, or have pieces but are not weights"
        )
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


def _check_copies(weights: dict[int, WeightUse], streaming: Streaming) -> None:
    """Check that exactly the streamed pieces are copied."""
    copied = {copy.piece for lane in streaming.lanes for copy in lane.copies}
    streamed = {index for index, piece in enumerate(streaming.pieces) if piece.streamed}
    for index in sorted(copied - streamed):
        what = f"piece {index}"
        if 0 <= index < len(streaming.pieces):
            what = f"{what} of {weights[streaming.pieces[index].value].name}"
        raise PlanError(f"{what} is copied, but is not a streamed piece")
    for index in sorted(streamed - copied):
        raise PlanError(f"nothing copies {weights[streaming.pieces[index].value].name}")


def _check_resident(weights: dict[int, WeightUse], streaming: Streaming) -> None:
    """Check that resident bytes belong to no copy and to no other resident piece."""
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
class _WeightMemory:
    """Reads by launches and writes by copies in the memory of weights."""

    weights: dict[int, WeightUse]
    streaming: Streaming
    reads: dict[int, list[int]]

    def at_first(self) -> Iterator[Touch]:
        """Resident pieces."""
        for index, piece in enumerate(self.streaming.pieces):
            if not piece.streamed:
                yield self._touch(index, is_write=True)

    def of_launch(self, launch: int, execution: int) -> Iterator[Touch]:
        """All pieces of the weights that it reads, whichever execution copied them."""
        return (self._touch(index, is_write=False) for index in self.reads.get(launch, ()))

    def of_copy(self, copy: Copy, execution: int) -> Iterator[Touch]:
        """Its piece."""
        yield self._touch(copy.piece, is_write=True)

    def launch_name(self, launch: int) -> str:
        """The launch, by its number: a demand has no names."""
        return f"launch {launch}"

    def copy_name(self, copy: Copy) -> str:
        """The copy, by its weight."""
        return f"the copy of {self._name(copy.piece)}"

    def _name(self, index: int) -> str:
        return self.weights[self.streaming.pieces[index].value].name

    def _touch(self, index: int, *, is_write: bool) -> Touch:
        piece = self.streaming.pieces[index]
        end = piece.memory_offset_bytes + piece.size_bytes
        return Touch("weights", piece.memory_offset_bytes, end, index, is_write)


def _check_order(weights: dict[int, WeightUse], n_launches: int, streaming: Streaming) -> None:
    reads: dict[int, list[int]] = {}
    gathered = {one.value for one in streaming.gathers}
    for index, piece in enumerate(streaming.pieces):
        if piece.value not in gathered:
            for launch in weights[piece.value].launches:
                reads.setdefault(launch, []).append(index)
    check_steps(streaming.lanes, n_launches, _WeightMemory(weights, streaming, reads))

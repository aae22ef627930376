"""Copies of a Program's weights in the memories of other devices, renewed after writes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence, Set

import torch

from offload.interpreter.eager_run import tensor_at
from offload.program import BoundProgram
from offload.run.optimizer_steps import OptimizerSteps
from offload.run.transfers import Memory, Piece, copy_pieces, stream_between


@dataclasses.dataclass(frozen=True, slots=True)
class WeightCopy:
    """One weight in another memory.

    Attributes:
        value: its Value in the whole Program.
        memory: the memory of the copy.
        holders: tensors over the copy, with the views that the model's tensors have of the weight.
        block: the whole copy.
    """

    value: int
    memory: Memory
    holders: tuple[torch.Tensor, ...]
    block: torch.Tensor


class WeightCopies:
    """The weights of one Program that segments on other devices read.

    Each is copied once to each memory. Later writes are detected by the counts that torch keeps for
    autograd, and by steps of optimizers; writes through `param.data`, NumPy or to tensors made in
    inference mode are not detected.

    Owner: one executable. Thread: one at a time, except for optimizers' steps.
    """

    def __init__(self, bound: BoundProgram, home: Memory) -> None:
        """Begin without copies."""
        self._bound, self._home = bound, home
        self._copies: dict[tuple[int, Memory], WeightCopy] = {}
        self._counts: dict[int, int] = {}  # of writes that the copies of a Value contain
        self._stepped: set[int] = set()
        self._lock = threading.Lock()
        self._steps: OptimizerSteps | None = None

    def __bool__(self) -> bool:
        """Whether there are copies."""
        return bool(self._copies)

    def on(self, memory: Memory, values: Iterable[int]) -> dict[int, tuple[torch.Tensor, ...]]:
        """Return the tensors of weights in a memory, by Value; copies missing weights there.

        Raises:
            OutOfMemory: the memory has no room for them.
        """
        return {value: self._copy(memory, value).holders for value in values}

    def part(self, used: Set[tuple[int, Memory]]) -> WeightCopies:
        """Return some of the copies, for an executable whose segments read them, and watch writes.

        Args:
            used: the Values, each with the memory of its copy.
        """
        found = WeightCopies(self._bound, self._home)
        found._copies = {key: one for key, one in self._copies.items() if key in used}
        held = {value: self._holders(value) for value, _ in found._copies}
        found._counts = {value: self._counts[value] for value in held}
        found._steps = OptimizerSteps(held, found._note_step) if held else None
        return found

    def size_bytes(self, memory: Memory) -> int:
        """Return the bytes of the copies in a memory."""
        return sum(one.block.nbytes for one in self._copies.values() if one.memory is memory)

    def copy_all_again(self) -> None:
        """Mark all copies stale, as weights have other storages or unseen writes."""
        self._note_step(list(self._counts))

    def stale(self) -> list[WeightCopy]:
        """Return the copies of weights written since; they count as copied from now on."""
        with self._lock:
            stepped, self._stepped = self._stepped, set()
        found: set[int] = set()
        for value, count in self._counts.items():
            now = _n_writes(self._holders(value))
            if now != count or value in stepped:
                found.add(value)
                self._counts[value] = now
        return [one for (value, _), one in self._copies.items() if value in found]

    def copied(self, copies: Sequence[WeightCopy], *, is_right: bool) -> None:
        """Note that copies were renewed, or that this failed and the next execution must do so."""
        if is_right:
            for one in copies:  # values derived from a copy are computed again
                torch.autograd.graph.increment_version(one.holders)
        else:
            self._note_step([one.value for one in copies])

    def pieces(self, copies: Sequence[WeightCopy]) -> list[Piece]:
        """Return the pieces to copy for them."""
        return [Piece(self._source(one.value), one.block, one.block.nbytes) for one in copies]

    def _note_step(self, values: list[int]) -> None:
        with self._lock:
            self._stepped.update(values)

    def _holders(self, value: int) -> Sequence[torch.Tensor]:
        return self._bound.bindings.weights[value]

    def _copy(self, memory: Memory, value: int) -> WeightCopy:
        found = self._copies.get((value, memory))
        if found is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():
            found = self._made(memory, value)
            stream = stream_between(self._home, memory)
            copy_pieces(self._home, memory, self.pieces([found]), stream)
        self._copies[value, memory] = found
        return found

    def _made(self, memory: Memory, value: int) -> WeightCopy:
        program = self._bound.program
        size_bytes = program.values[value].size_bytes
        self._counts.setdefault(value, _n_writes(self._holders(value)))
        block = memory.bytes(size_bytes)
        views = program.weight_views[value]
        holders = tuple(tensor_at(block.untyped_storage(), 0, one) for one in views)
        return WeightCopy(value, memory, holders, block)

    def _source(self, value: int) -> torch.Tensor:
        """Return the weight's bytes from the first on."""
        one, view = self._holders(value)[0], self._bound.program.weight_views[value][0]
        begin = int(one.storage_offset()) * one.element_size() - view.offset_bytes
        found = torch.empty(0, dtype=torch.uint8, device=one.device)
        size_bytes = self._bound.program.values[value].size_bytes
        return found.set_(one.untyped_storage(), begin, (size_bytes,), (1,))


def _n_writes(holders: Sequence[torch.Tensor]) -> int:
    return sum(_counted(holders))


def _counted(holders: Sequence[torch.Tensor]) -> Iterator[int]:
    return (one._version for one in holders if not one.is_inference())

"""A call that ran unrecorded because it read a tensor on the host, and is recorded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from offload.errors import CaptureError
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.torch_names import find_dtype
from offload.program import Role
from offload.program.structure import Structure
from offload.program.structure_match import StructureMismatch, match
from offload.record.drawn_before import DrawnBefore
from offload.record.operators import is_tensor
from offload.record.same_outcome import as_dtype, same_bits, same_but_for_kernels
from offload.record.storages import StorageTable, TrackedStorage


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenState:
    """The bytes of an input or a weight that a call wrote, before and after it."""

    tracked: TrackedStorage
    before: torch.Tensor
    after: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PlainCall:
    """The results and effects of a call that ran with `is_compiling()` false.

    Attributes:
        refusal: the refusal of its first host read, in words.
        read: that read, and its place.
        results: the tensors that it returned.
        structure: their nesting.
        state: the state that it wrote, by a key that identifies inputs and weights.
        drawn: the outcomes of its random launches.
    """

    refusal: str
    read: str
    results: Sequence[torch.Tensor]
    structure: Structure
    state: Mapping[tuple[str, int], WrittenState]
    drawn: DrawnBefore

    def put_back(self, *, before: bool) -> None:
        """Let inputs and weights hold what they held before the call, or after it."""
        with torch.no_grad():
            for one in self.state.values():
                bytes_of(one.tracked.storage).copy_(one.before if before else one.after)

    def compare(
        self, result: object, tensors: Sequence[torch.Tensor], written: Iterable[TrackedStorage]
    ) -> str:
        """Compare with the same call made with `is_compiling()` true.

        Args:
            result: the result of that call.
            tensors: the tensors in it.
            written: the inputs and weights that it wrote.

        Returns:
            How they agree, in words.

        Raises:
            CaptureError: they differ.
        """
        try:
            match(self.structure, result, is_tensor, "the result")
        except StructureMismatch as error:
            raise self._differs(f"another result: {error}") from error
        if self.drawn.n_left:
            raise self._differs("other random numbers")
        pairs = [
            (f"result {position}", plain, other)
            for position, (plain, other) in enumerate(zip(self.results, tensors, strict=True))
        ]
        found = {_key(one): one for one in written}
        if others := sorted(name for name, _ in found.keys() ^ self.state.keys()):
            raise self._differs(f"other changes: {', '.join(others)}")
        for key, one in self.state.items():
            dtype = find_dtype(one.tracked.value.dtype)
            contents = (as_dtype(one.after, dtype), as_dtype(found[key].content(), dtype))
            pairs.append((one.tracked.value.name, *contents))
        if all(same_bits(plain, other) for _, plain, other in pairs):
            return "the same bits"
        for name, plain, other in pairs:
            if not same_but_for_kernels(plain, other):
                raise self._other_values(name, plain, other)
        return (
            "the same values but for the rounding of other kernels (1e-4 of the largest in float32)"
        )

    def _other_values(self, name: str, plain: torch.Tensor, other: torch.Tensor) -> CaptureError:
        refusal = self._differs(f"another {name}{_distance(plain, other)}")
        if plain.shape == other.shape and plain.dtype == other.dtype:
            refusal.add_note(
                "a model that reads uninitialised memory (torch.empty) may also differ in each "
                "call: initialise that memory"
            )
        return refusal

    def _differs(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.refusal}. The model avoids this read when torch.compiler.is_compiling() "
            f"returns True, but then gives {what}"
        )


def plain_call(
    refusal: str,
    read: str,
    *,
    results: Sequence[torch.Tensor],
    structure: Structure,
    table: StorageTable,
    drawn: DrawnBefore,
) -> PlainCall:
    """Return the results and effects of a call, at its end.

    Raises:
        CaptureError: it wrote state whose earlier content was not kept.
    """
    state = {
        _key(one): WrittenState(one, one.kept(), one.content().clone())
        for one in table
        if one.is_state and one.written
    }
    return PlainCall(refusal, read, results, structure, state, drawn)


def _key(tracked: TrackedStorage) -> tuple[str, int]:
    """A key across recordings: inputs have new storages in each, and weights may share a name."""
    is_weight = tracked.value.role is Role.WEIGHT
    return tracked.value.name, tracked.storage._cdata if is_weight else 0


def _distance(plain: torch.Tensor, other: torch.Tensor) -> str:
    if plain.shape != other.shape or not plain.is_floating_point():
        return ""
    return f", which differs by up to {(plain - other).abs().max().item():.3g}"

"""Which weights of a Program get a memory of their own, and where their content is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.program import BoundProgram, Program, StoredTensor

Sources = Mapping[int, list[torch.Tensor] | StoredTensor]
"""By Value of role weight where its content is; their order numbers the native side's weights."""


def native_source(
    content: list[torch.Tensor] | torch.Tensor | StoredTensor,
) -> _native.FileRange | torch.Tensor | list[torch.Tensor]:
    """Where the native side reads a weight from.

    Args:
        content: a place in a file; the model's tensors on one storage, whose changes are seen; or
            a tensor that nobody changes, of which all of the storage is read.
    """
    if isinstance(content, StoredTensor):
        return _native.FileRange(content.path, content.offset_bytes)
    if isinstance(content, torch.Tensor):
        return bytes_of(content.untyped_storage())
    return content


def managed_weights(bound: BoundProgram) -> Sources:
    """The weights that get a memory of their own, and where their content is.

    Those in files; and where none is, those in memory that no launch writes. All others are used
    where they lie, and count in the budget.
    """
    program = bound.program
    if bound.bindings.stored:
        return bound.bindings.stored
    written = {index for launch in program.launches for index in launch.writes}
    return {
        index: list(tensors)
        for index, tensors in bound.bindings.weights.items()
        if index not in written
    }


def native_weights(
    program: Program, streaming: Streaming, sources: Sources
) -> list[_native.StreamedWeight]:
    """The managed weights with their pieces, for the native side."""
    pieces: dict[int, list[tuple[int, int, int, bool]]] = {value: [] for value in sources}
    gathered = {one.value for one in streaming.gathers}
    for one in streaming.pieces:
        if one.value in pieces and one.size_bytes:
            place = (one.offset_bytes, one.size_bytes, one.memory_offset_bytes, one.streamed)
            pieces[one.value].append(place)
    return [
        _native.StreamedWeight(
            name=program.values[value].name,
            size_bytes=program.values[value].size_bytes,
            pieces=pieces[value],
            source=native_source(content),
            gathered=value in gathered,
        )
        for value, content in sources.items()
    ]


def native_transfers(
    program: Program, streaming: Streaming, sources: Sources
) -> list[tuple[int, int, int, int, int, int]]:
    """The transfers of a pass, for the native side: weights and their pieces by number."""
    numbers = {value: number for number, value in enumerate(sources)}
    places: dict[int, tuple[int, int]] = {}  # by piece: the weight, and which of its pieces
    n_pieces = dict.fromkeys(sources, 0)
    for index, piece in enumerate(streaming.pieces):
        if piece.value in numbers and piece.size_bytes:
            places[index] = (numbers[piece.value], n_pieces[piece.value])
            n_pieces[piece.value] += 1
    readers: dict[int, list[int]] = {}
    for launch in program.launches:
        for value in launch.reads:
            readers.setdefault(value, []).append(launch.index)
    ends = dict.fromkeys(places, len(program.launches))  # by piece, where its next copy is read
    found = []
    for one in reversed(streaming.transfers):
        reads = readers[streaming.pieces[one.piece].value]
        last_launch = max(launch for launch in reads if launch < ends[one.piece])
        ends[one.piece] = one.first_launch
        place = places[one.piece]
        found.append((*place, one.first_launch, last_launch, one.after_launch, one.after_pass))
    return found[::-1]


def managed_tensors(
    program: Program, sources: Sources, memory: Sequence[torch.UntypedStorage]
) -> Mapping[int, torch.Tensor]:
    """The tensor that was recorded for each managed weight, on the memory that it has now.

    Args:
        program: has the weights.
        sources: as `managed_weights` gives them.
        memory: for each of them its bytes.
    """
    bases = {value: (storage, 0) for value, storage in zip(sources, memory, strict=True)}
    run = EagerRun(BoundProgram(program), bases, fill=None)
    return {value: run.tensor(program.weight_views[value][0]) for value in sources}

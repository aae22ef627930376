"""The weights of a Program with separate memory, and the sources of their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.program import BoundProgram, Program, StoredTensor

Sources = Mapping[int, list[torch.Tensor] | StoredTensor]
"""The content of each Value of role weight; the order numbers the native side's weights."""


def native_source(
    content: list[torch.Tensor] | torch.Tensor | StoredTensor,
) -> _native.FileRange | torch.Tensor | list[torch.Tensor]:
    """Return the native side's source of a weight.

    Args:
        content: a place in a file; the model's tensors on one storage, whose changes are detected;
            or an immutable tensor, whose whole storage is read.
    """
    if isinstance(content, StoredTensor):
        return _native.FileRange(content.path, content.offset_bytes)
    if isinstance(content, torch.Tensor):
        return bytes_of(content.untyped_storage())
    return content


def managed_weights(bound: BoundProgram) -> Sources:
    """Return the weights that get separate memory, and the sources of their content.

    These are the weights in files; where no weight is in a file, those in memory that no launch
    writes. All others are used in place, and count in the budget.
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
    """Return the managed weights with their pieces, for the native side."""
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
    """Return the transfers of a pass, for the native side: weights and their pieces by number."""
    numbers = {value: number for number, value in enumerate(sources)}
    places: dict[int, tuple[int, int]] = {}  # by piece: the weight, and the index among its pieces
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
    """Return the recorded tensor of each managed weight, on its present memory.

    Args:
        program: the program of the weights.
        sources: the result of `managed_weights`.
        memory: the bytes of each.
    """
    bases = {value: (storage, 0) for value, storage in zip(sources, memory, strict=True)}
    run = EagerRun(BoundProgram(program), bases, fill=None)
    return {value: run.tensor(program.weight_views[value][0]) for value in sources}

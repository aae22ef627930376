"""Weights on the CPU that are brought from files, or from the model's tensors, while launches run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import _native
from offload.eager_run import EagerRun
from offload.program import Program, StoredTensor
from offload.streaming import Piece, Streaming


def make_stream(program: Program, streaming: Streaming) -> _native.WeightStream:
    """The memory of the weights that a plan names, and what brings them; resident ones are there.

    Raises:
        ExecutionError: there is not enough memory.
        FileError: a file is shorter than it was, or cannot be read.
    """
    pieces: dict[int, list[Piece]] = {}
    places: list[tuple[int, int]] = []  # by piece: the weight, and which of its pieces
    weights = {piece.value: 0 for piece in streaming.pieces}
    for number, value in enumerate(weights):
        weights[value] = number
    for piece in streaming.pieces:
        own = pieces.setdefault(piece.value, [])
        places.append((weights[piece.value], len(own)))
        own.append(piece)
    stream = _native.WeightStream(
        memory_bytes=streaming.memory_bytes,
        granule_bytes=streaming.granule_bytes,
        weights=[_weight(program, value, own) for value, own in pieces.items()],
        transfers=[
            (
                *places[one.piece],
                one.first_launch,
                one.last_launch,
                one.after_launch,
                one.after_pass,
            )
            for one in streaming.transfers
        ],
        n_launches=len(program.launches),
    )
    stream.load(None)
    return stream


def _weight(program: Program, value: int, pieces: Sequence[Piece]) -> _native.StreamedWeight:
    stored = program.stored.get(value)
    return _native.StreamedWeight(
        name=program.values[value].name,
        size_bytes=program.values[value].size_bytes,
        pieces=[
            (one.offset_bytes, one.size_bytes, one.memory_offset_bytes, one.streamed)
            for one in pieces
        ],
        source=native_source(
            program.weights[value][0] if stored is None else stored
        ),
    )

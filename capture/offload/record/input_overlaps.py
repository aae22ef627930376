"""Inputs of a recorded call that share memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload.program import Overlap
from offload.record.storages import StorageTable


def common_memory(
    table: StorageTable, given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Iterator[tuple[int, int, int]]:
    """Yield pairs of inputs that share bytes, with the distance of their addresses.

    Args:
        table: where the inputs are tracked.
        given: the caller's tensors.
        inputs: the tensors that represent them in the recording.
    """
    spans = [
        (leaf, tensor.data_ptr(), table.of(one).value.size_bytes)
        for leaf, (tensor, one) in enumerate(zip(given, inputs, strict=True))
    ]
    for position, (first, start, size) in enumerate(spans):
        for second, other, other_size in spans[position + 1 :]:
            if start < other + other_size and other < start + size:
                yield first, second, other - start


def written_overlaps(
    table: StorageTable, given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[Overlap, ...]:
    """Pairs of inputs that share bytes and of which at least one is written; as `common_memory`."""
    return tuple(
        Overlap(first, second, distance_bytes)
        for first, second, distance_bytes in common_memory(table, given, inputs)
        if table.of(inputs[first]).written or table.of(inputs[second]).written
    )

"""Which weights of a Program get a memory of their own, and where their content is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload import _native
from offload.eager_run import bytes_of
from offload.program import Program, StoredTensor


def native_source(content: torch.UntypedStorage | StoredTensor) -> _native.FileRange | torch.Tensor:
    """Where the native side reads a weight from: a place in a file, or all of a storage."""
    if isinstance(content, StoredTensor):
        return _native.FileRange(content.path, content.offset_bytes)
    return bytes_of(content)


def managed_weights(program: Program) -> Mapping[int, torch.UntypedStorage | StoredTensor]:
    """The weights that get a memory of their own, and where their content is.

    Those in files; and where none is, those in memory that no launch writes. All others are used
    where they lie, and count in the budget.
    """
    if program.stored:
        return program.stored
    written = {index for launch in program.launches for index in launch.writes}
    return {
        index: tensors[0].untyped_storage()
        for index, tensors in program.weights.items()
        if index not in written
    }

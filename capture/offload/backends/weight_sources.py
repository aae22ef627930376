"""Which weights of a Program get a memory of their own, and where their content is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload import _native
from offload.eager_run import bytes_of
from offload.program import Program, StoredTensor


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


def managed_weights(program: Program) -> Mapping[int, list[torch.Tensor] | StoredTensor]:
    """The weights that get a memory of their own, and where their content is.

    Those in files; and where none is, those in memory that no launch writes. All others are used
    where they lie, and count in the budget.
    """
    if program.stored:
        return program.stored
    written = {index for launch in program.launches for index in launch.writes}
    return {
        index: list(tensors) for index, tensors in program.weights.items() if index not in written
    }

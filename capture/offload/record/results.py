"""The tensors that a recorded call returned: as views of Values, and as given to the caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from offload.program import Result, Role
from offload.program.structure import Structure, unflatten
from offload.record.device_formats import refuse_own_format
from offload.record.host_constants import check_result
from offload.record.launches import LaunchRecorder
from offload.record.operators import check_plain
from offload.record.storages import StorageTable


@dataclasses.dataclass(frozen=True, slots=True)
class GivenTensors:
    """The caller's tensors, and their stand-ins in the recording.

    Attributes:
        own: the caller's own tensors.
        twins: the tensors that the call received instead, in the same order.
        table: the table that tracks the twins.
    """

    own: Sequence[torch.Tensor]
    twins: Sequence[torch.Tensor]
    table: StorageTable


def result_of(tensor: torch.Tensor, log: LaunchRecorder, inputs: Sequence[torch.Tensor]) -> Result:
    """A tensor of the result as a view of its Value.

    Raises:
        CaptureError: no Program can return it.
    """
    check_plain(tensor, "a result")
    refuse_own_format(tensor, "a result")
    tracked = log.track(tensor, "the result")
    check_result(tracked, log.table.device)
    return Result(log.table.view(tensor, tracked), _leaf(tensor, inputs))


def handed_out(
    result: Any, tensors: Sequence[torch.Tensor], structure: Structure, given: GivenTensors
) -> Any:
    """The result with the caller's own tensors, or tensors detached from their twins."""
    own = [_own(tensor, given) for tensor in tensors]
    same = all(one is other for one, other in zip(own, tensors, strict=True))
    return result if same else unflatten(structure, own)


def _own(tensor: torch.Tensor, given: GivenTensors) -> torch.Tensor:
    leaf = _leaf(tensor, given.twins)
    if leaf >= 0:
        return given.own[leaf]
    tracked = given.table.find(tensor)
    is_view = tracked is not None and tracked.value.role is Role.INPUT
    return tensor.detach() if is_view else tensor


def _leaf(tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    """The position of a tensor among the inputs; -1 if it is not an input."""
    leaves = (leaf for leaf, given in enumerate(inputs) if tensor is given)
    return next(leaves, -1)

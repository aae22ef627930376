"""Refusals of launches and tensors of a step that trains, where a replay would differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from offload.errors import CaptureError

if TYPE_CHECKING:
    from offload.record.launches import LaunchRecorder


def hidden_leaves(log: LaunchRecorder, known: Iterable[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that a call used and that have an unwatched gradient.

    Args:
        log: the call's launches.
        known: the leaves that are watched, by id.
    """
    watched = set(known)
    for tracked in log.table:
        for one in tracked.holders:
            is_leaf = one.is_leaf and one.requires_grad and id(one) not in watched
            grad = one.grad if is_leaf else None
            if grad is None or grad.layout is not torch.strided:
                continue
            if log.table.find(grad) is not None:
                yield tracked.value.name, one


# Kernels that keep data for the backward pass depending on torch's grad mode alone, which is off in
# executions: `workspace` in aten/src/ATen/native/mkldnn/RNN.cpp.
_BY_GRAD_MODE = {
    "aten::mkldnn_rnn_layer": (
        "capture and execute the step under torch.backends.mkldnn.flags(enabled=False), where "
        "torch computes it by other operators"
    )
}


def refuse_kernels(log: LaunchRecorder) -> None:
    """Refuse kernels that behave differently where gradients are off, as in executions.

    Raises:
        CaptureError: there is one; it names the launch, and what to do.
    """
    for launch in log.launches:
        if advice := _BY_GRAD_MODE.get(launch.name):
            raise CaptureError(
                f"{launch.source}: {launch.name} keeps what its gradient needs where gradients are "
                f"switched on, and executions have them switched off: {advice}"
            )

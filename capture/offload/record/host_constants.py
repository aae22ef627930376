"""Host constants: CPU tensors without dimensions in a recording on another device.

(Tensors of any shape where compiled code may have read them unobserved.)

torch reads them on the host when it launches a kernel, whose arguments then hold their value. So
each execution must find the recorded values (see `native/replay/host_constants.hpp`), and results
that the call computes from them alone are constant too: such launches are folded, and their results
kept with the weights. As launches on the host they would give the same values at each execution, or
no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.operators import Overload
from offload.record.reading_trainers import trainer_that_reads

if TYPE_CHECKING:
    from offload.record.storages import TrackedStorage


COMPARED_BYTES = 64 * 1024
"""Limit for CPU tensors that compiled code may have read: comparing this many takes a few us."""


def may_be_host_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a host constant where the recording is not on the CPU."""
    return tensor.device.type == "cpu" and tensor.dim() == 0


def check_host_constant(
    tensor: torch.Tensor, tracked: TrackedStorage, device: torch.device
) -> None:
    """Refuse a tensor on another device than the recording that is not a host constant.

    Raises:
        CaptureError: it is on another accelerator, has dimensions, or shares its memory.
    """
    name = tracked.value.name
    if device.type == "cpu" or tensor.device.type != "cpu":
        raise CaptureError(
            f"{user_location()}: {name} is on {tensor.device}, but the recording is on {device}: "
            "move all tensors of the model to one device. A call without tensors is recorded on "
            f'torch\'s default device: capture it under torch.device("{tensor.device}")'
        )
    if tensor.dim():
        raise CaptureError(
            f"{user_location()}: {name}, of shape {list(tensor.shape)}, is on the CPU, and the "
            f"recording is on {device}: only tensors of no dimensions may be on the CPU, where "
            f'launches take their value as a constant; move it with .to("{device}")'
        )
    if tracked.value.size_bytes != tensor.element_size():
        raise CaptureError(
            f"{user_location()}: {name} is one number of a larger tensor on the CPU, and the "
            f"recording is on {device}: give it memory of its own with .clone(), or move it with "
            f'.to("{device}")'
        )


def check_read_unseen(tracked: TrackedStorage, device: torch.device) -> None:
    """Refuse a CPU tensor that unseen code may read and that is too large to compare each time.

    Raises:
        CaptureError: it has more than COMPARED_BYTES.
    """
    size_bytes = tracked.value.size_bytes
    if size_bytes > COMPARED_BYTES:
        raise CaptureError(
            f"{tracked.value.name}, of {size_bytes} bytes, is on the CPU, and the recording is on "
            f"{device}: compiled code may read it there when it is captured, and each execution "
            f"would have to compare it, which it does up to {COMPARED_BYTES} bytes; move it with "
            f'.to("{device}"), or remove it from the model'
        )


def refuse_write(operator: str, tracked: TrackedStorage, device: torch.device) -> None:
    """Refuse a launch that writes a host constant.

    Raises:
        CaptureError: `tracked` is a host constant.
    """
    if tracked.value.on_host:
        _, advice = trainer_that_reads()
        advice = advice or f'compute a new tensor (x = x + 1), or move it with .to("{device}")'
        raise CaptureError(
            f"{user_location()}: {operator} writes {tracked.value.name}, a tensor on the CPU, "
            f"whose value launches on {device} take as a constant: {advice}"
        )


def check_made(operator: Overload, made: list[TrackedStorage], device: torch.device) -> None:
    """Refuse results of an operator on the CPU, unless they are as constant as its arguments.

    Raises:
        CaptureError: the operator copies from the device, draws random numbers, leaves memory
            unwritten, or is not torch's own.
    """
    for tracked in made:
        if not tracked.value.on_host or tracked.known:
            continue
        if operator.random:
            reason = "draws random numbers there, different ones at each execution"
        elif operator.reserves or operator.moves_metadata:
            reason = "reserves memory there to be written"
        elif operator.is_aten:
            reason = "computes it from tensors that are not constants there"
        else:
            reason = "may do more than torch's own operators"
        raise CaptureError(
            f"{user_location()}: {operator.name} makes a tensor on the CPU and {reason}, and the "
            f"recording is on {device}, whose launches take tensors on the CPU as constants: make "
            f"it on {device}"
        )


def check_result(tracked: TrackedStorage, device: torch.device) -> None:
    """Refuse a host constant as a result.

    Raises:
        CaptureError: `tracked` is a host constant.
    """
    if tracked.value.on_host:
        raise CaptureError(
            f"a result is {tracked.value.name}, a tensor on the CPU, which a program on {device} "
            f'does not return: leave it out of the result, or return it moved with .to("{device}")'
        )


def check_undrawn(
    before: torch.Tensor | None, compiled: tuple[str, ...], device: torch.device
) -> None:
    """Refuse random numbers that compiled code drew on the CPU: kernels would hold them.

    Args:
        before: the state of torch's CPU generator before the call; None: not checked.
        compiled: the compiled parts that may have drawn.
        device: of the recording.

    Raises:
        CaptureError: the generator has moved.
    """
    if before is not None and not torch.equal(before, torch.default_generator.get_state()):
        raise CaptureError(
            f"{', '.join(compiled)} is compiled, and draws random numbers on the CPU or seeds its "
            f"generator, or another thread does meanwhile, and the recording is on {device}, "
            "whose launches would repeat the numbers that were drawn: draw them there, with "
            f'device="{device}"'
        )

"""Refusals of devices before anything runs."""

from __future__ import annotations

from collections.abc import Set

from offload.errors import BindingError, CaptureError
from offload.interpreter.device_formats import own_format
from offload.program import BoundProgram, Launch, Overlap, Program, Symbol


def refuse_launch(launch: Launch, device_type: str) -> None:
    """Refuse launches that a graph on a device of this type cannot execute by itself.

    Raises:
        CaptureError: the launch reads on the host, or makes host memory.
    """
    if launch.guard is not None or launch.guards_shape:
        what = (
            "is read on the host" if launch.guard is not None else "has shapes that depend on data"
        )
        raise CaptureError(
            f"{launch.source}: the result of {launch.name} {what}, and an execution would have to "
            "wait for it in the middle of a device's graph: compute with it on the device "
            "(torch.where, masks), or read it outside of the captured model"
        )
    for argument in launch.arguments:
        is_device = isinstance(argument, Symbol) and argument.kind == "device"
        if is_device and not str(argument).startswith(device_type):
            raise CaptureError(
                f"{launch.source}: {launch.name} makes a tensor on {argument}, which a graph on "
                f"{device_type} cannot do: make it on {device_type}, or pass it as an input"
            )


def refuse_unaligned(program: Program, overlap: Overlap, alignment_bytes: int) -> None:
    """Refuse overlapping inputs, one of them written, of which one must be less aligned.

    Raises:
        CaptureError: their distance is not a multiple of the alignment.
    """
    if overlap.distance_bytes % alignment_bytes:
        first, second = (
            program.values[program.inputs[leaf].value].name
            for leaf in (overlap.first, overlap.second)
        )
        raise CaptureError(
            f"{first} and {second} share memory, {abs(overlap.distance_bytes)} bytes apart, and "
            "one of them is written: neither can be copied elsewhere, and kernels are chosen for "
            f"addresses that are multiples of {alignment_bytes} bytes: capture with inputs "
            "that lie a multiple of that apart, or share no memory"
        )


def check_formats(bound: BoundProgram) -> None:
    """Refuse weights whose format has changed since they were recorded.

    Raises:
        BindingError: a weight was cast since.
    """
    program = bound.program
    for index, holders in bound.bindings.weights.items():
        value, found = program.values[index], own_format(holders[0])
        if found != value.device_format:
            was, now = (
                f"the device's format {one}" if one else "plain memory"
                for one in (value.device_format, found)
            )
            raise BindingError(
                f"{value.name}: it lay in {was} when it was recorded, and now lies in {now}: cast "
                "it before the capture, and capture again"
            )


def refuse_shared(bound: BoundProgram, packed: Set[int]) -> None:
    """Refuse packed weights in memory that other processes may write undetected.

    Raises:
        BindingError: a weight was moved there since the Program was loaded.
    """
    for index in packed & bound.bindings.weights.keys():
        if any(holder.is_shared() for holder in bound.bindings.weights[index]):
            raise BindingError(
                f"{bound.program.values[index].name}: its memory is now shared with other "
                "processes, whose writes are not detected, and kernels read a packed copy; load "
                "the program again: shared weights are not packed"
            )


def check_weights(bound: BoundProgram, named: Set[int], alignment_bytes: int) -> None:
    """Refuse weights in another format than recorded, and those that are less aligned.

    Args:
        bound: its weights.
        named: those whose addresses words hold.
        alignment_bytes: of each of these when it was captured.

    Raises:
        BindingError: a weight was cast since, or a storage's address is not a multiple of the
            alignment.
    """
    program = bound.program
    check_formats(bound)
    for index, holders in bound.bindings.weights.items():
        address = holders[0].untyped_storage().data_ptr()
        if index in named and address % alignment_bytes:
            raise BindingError(
                f"{program.values[index].name}: its memory begins at 0x{address:x}, and kernels "
                f"are chosen for multiples of {alignment_bytes} bytes: give it a clone()"
            )

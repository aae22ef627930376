"""From a recording to a Program that does all that the call did: of launches, or opaque."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch

from offload.backends import find_backend
from offload.compile import compiled_triton
from offload.errors import BackendUnavailable, CaptureError
from offload.program import BoundProgram, DeviceKernel, TritonKernel
from offload.program.dead_launches import remove_dead_launches
from offload.record import OutcomeDiffers, Recorder, Recording, verify
from offload.record.triton_launches import CompileTriton


def runs_opaque(device: str) -> bool:
    """Whether Programs recorded on a device type may be one opaque launch there."""
    try:
        return find_backend(device).opaque is not None
    except BackendUnavailable:
        return False


def triton_compiler(device_type: str) -> CompileTriton | None:
    """What compiles Triton kernels for a device type; None where their launches are not recorded.

    Recorded are those on "cuda". Elsewhere Triton runs none, or interprets them.
    """
    return _compile_triton if device_type == "cuda" else None


def _compile_triton(
    kernel: TritonKernel, device: torch.device
) -> tuple[DeviceKernel, frozenset[str]]:
    found = compiled_triton(kernel, device)
    return found.kernel, found.written


def recorded_program(recorder: Recorder, recording: Recording) -> BoundProgram:
    """The verified Program of a recording; not verified if nothing was computed.

    On a device that runs opaque launches it is opaque if the callable launches more than was seen,
    or if what was seen does not explain its results.

    Raises:
        CaptureError: neither form does what the call did, or running it again changed state in
            Python.
        ExecutionError: the device failed.
    """
    if not recording.computed:
        bound = without_dead_launches(recording.bound)
        return _unchecked(bound, "nothing was computed when it was recorded")
    recorder.agree("the call is recorded")
    recording, unchecked = _with_unseen_work(recording)
    bound = without_dead_launches(recording.bound)
    try:
        verify(recording, bound, recorder.rendezvous)
    except OutcomeDiffers as error:
        is_last_form = recording.opaque is None or unchecked or bound.program.opaque is not None
        if is_last_form or bound.program.is_random:  # as one launch it could not be compared
            raise
        recording = recording.as_opaque(f"its launches do not explain its results: {error}")
        bound = without_dead_launches(recording.bound)
        verify(recording, bound)
    if recording.observed is not None:
        recorder.check_unchanged()
    if bound.program.opaque is not None and bound.program.is_random:
        unchecked = (
            "it draws random numbers, and comparing its results would draw them from generators "
            "that other threads use"
        )
    return _unchecked(bound, unchecked)


def _unchecked(bound: BoundProgram, why: str) -> BoundProgram:
    program = dataclasses.replace(bound.program, unchecked=why)
    return dataclasses.replace(bound, program=program) if why else bound


def without_dead_launches(bound: BoundProgram) -> BoundProgram:
    """The same without launches whose results are unused."""
    rewritten = remove_dead_launches(bound.program)
    return BoundProgram(rewritten.program, bound.bindings.moved(rewritten.positions))


def _with_unseen_work(recording: Recording) -> tuple[Recording, str]:
    """The recording, as opaque if the callable does more than was seen; and why that is unknown.

    Raises:
        ExecutionError: the device failed.
    """
    if recording.observed is None or recording.bound.program.opaque is not None:
        return recording, ""
    if recording.opaque is None:
        return recording, recording.unchecked
    opaque = without_dead_launches(recording.opaque)
    try:
        launcher = find_backend(recording.device.type).opaque
        assert launcher is not None  # else no opaque form would have been recorded
        unseen = launcher.unseen_work(recording.observed, opaque)
    except (CaptureError, BackendUnavailable) as error:
        return recording, str(error)
    if not unseen:
        return recording, ""
    names = ", ".join(f"{count} x {name}" for name, count in sorted(Counter(unseen).items()))
    return recording.as_opaque(f"it launches work that the recorder cannot see: {names}"), ""

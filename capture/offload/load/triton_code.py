"""Compiles a Program's Triton kernels for the GPU that runs it, where they are not compiled yet."""

from __future__ import annotations

import torch

from offload.backends import Backend
from offload.compile import with_triton_code
from offload.program import BoundProgram, TritonKernel


def with_code(bound: BoundProgram, backend: Backend) -> BoundProgram:
    """The Program with the code of its Triton kernels, if the device runs such code.

    Raises:
        BackendUnavailable: the Program has such kernels, and the GPU is missing.
        CaptureError: a kernel cannot be compiled.
    """
    if backend.records() != "cuda" or not backend.capabilities.runs_kernels:
        return bound
    if not any(isinstance(one.callee, TritonKernel) for one in bound.program.launches):
        return bound
    backend.machine(bound.program.device_index)
    return with_triton_code(bound, device_of(bound) or torch.device("cuda"))


def device_of(bound: BoundProgram) -> torch.device | None:
    """The GPU that runs a Program; None for the CPU."""
    program = bound.program
    if program.device == "cpu":
        return None
    index = program.device_index
    if index is None:
        index = torch.get_device_module(program.device).current_device()
    return torch.device(program.device, index)

"""Weights on a CUDA device under a budget: their memory, the host store, the link."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from offload.backends.captured.device_streaming import (
    LinkMeter,
    refuse_unstored,
    stream_arguments,
)
from offload.backends.cuda.capture import device_of
from offload.backends.cuda.driver import call
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.backends.loaded import Prepared
from offload.backends.weight_sources import managed_tensors
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.plan.topology import Link, MemoryLayout, MemoryUnit
from offload.program import BoundProgram, Program

link_meter = LinkMeter(_native.cuda_link_samples)


class CudaWeights:
    """Copies weights from host memory, within the graph; see `WeightStreamer`."""

    gathers_rows = False

    def __init__(self, alignment_bytes: int) -> None:
        """Serve a device with this alignment of weights."""
        self._alignment_bytes = alignment_bytes

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """The costs of a copy from the host, measured once per process; the same for all memory.

        Raises:
            BackendUnavailable: the program's weights are not in files.
            ExecutionError: the driver failed, or has no memory to measure with.
        """
        refuse_unstored(bound)
        return link_meter.link(device_of(bound.program))

    def memory_layout(self, program: Program) -> MemoryLayout:
        """Memory mapped and allocated by granules, 2 MiB on present GPUs.

        Raises:
            BackendUnavailable: the driver, or this GPU, is missing.
            ExecutionError: the driver failed.
        """
        granule_bytes = _native.cuda_granularity_bytes(device_of(program))
        return MemoryLayout(self._alignment_bytes, granule_bytes, MemoryUnit(granule_bytes))

    def free_bytes(self, program: Program) -> int:
        """Free memory of the Program's GPU, including the cache of torch's allocator."""
        return free_bytes(device_of(program))

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Return it unchanged: kernels receive the weights' addresses like all others."""
        return prepared


def make_stream(
    bound: BoundProgram, streaming: Streaming, device: int, tensor_device: torch.device
) -> tuple[_native.CudaWeightStream, Mapping[int, torch.Tensor]]:
    """Create the weights' memory on the device and the host store; nothing is read yet.

    Returns:
        The stream, and for each weight that it manages the recorded tensor in its memory.

    Raises:
        BackendUnavailable: the weights have no store on the host.
        PlanError: the host has no room for the store.
        OutOfMemory: the device has no room for the weights.
        ExecutionError: the driver does not register the store.
        FileError: a file is missing, or shorter than before.
    """
    program = bound.program
    held_bytes = functools.partial(_native.cuda_held_bytes, device)
    arguments = stream_arguments(bound, streaming, held_bytes)
    stream = with_memory_of_torch(lambda: _native.CudaWeightStream(device=device, **arguments))
    numbers = range(len(bound.bindings.stored))
    memory = [stream.tensor(number, str(tensor_device)).untyped_storage() for number in numbers]
    return stream, managed_tensors(program, bound.bindings.stored, memory)


def free_bytes(device: int) -> int:
    """Memory available to weights, including the cache of torch's allocator.

    Raises:
        ExecutionError: the driver failed.
    """
    with DeviceMemory(device):  # for its context
        free, _ = call("cuMemGetInfo")
    if not torch.cuda.is_available():
        return int(free)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

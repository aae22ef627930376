"""Weights on a CUDA device under a budget: their memory, the host store, the link."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from offload.backends.captured.device_streaming import LinkMeter, stream_arguments
from offload.backends.cuda.graph import call
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.backends.weight_sources import managed_tensors
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.program import BoundProgram

link_meter = LinkMeter(_native.cuda_link_samples)


def make_stream(
    bound: BoundProgram, streaming: Streaming, device: int, tensor_device: torch.device
) -> tuple[_native.CudaWeightStream, Mapping[int, torch.Tensor]]:
    """The weights' memory on the device and the host store; nothing is read yet.

    Returns:
        The stream, and for each weight that it manages the tensor that was recorded, there.

    Raises:
        BackendUnavailable: the weights have no store on the host.
        PlanError: the host has no room for the store.
        OutOfMemory: the device has no room for the weights.
        ExecutionError: the driver does not register the store.
        FileError: a file is gone, or shorter than it was.
    """
    program = bound.program
    held_bytes = functools.partial(_native.cuda_held_bytes, device)
    arguments = stream_arguments(bound, streaming, held_bytes)
    stream = with_memory_of_torch(lambda: _native.CudaWeightStream(device=device, **arguments))
    numbers = range(len(bound.bindings.stored))
    memory = [stream.tensor(number, str(tensor_device)).untyped_storage() for number in numbers]
    return stream, managed_tensors(program, bound.bindings.stored, memory)


def free_bytes(device: int) -> int:
    """Memory that weights could take, what torch's allocator only keeps for later included.

    Raises:
        ExecutionError: the driver failed.
    """
    with DeviceMemory(device):  # for its context
        free, _ = call("cuMemGetInfo")
    if not torch.cuda.is_available():
        return int(free)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
